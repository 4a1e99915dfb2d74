// What the threads of cpu.h do with memory, written down for Python to count.
//
// The compiler's thread sanitizer puts a call before each access to memory. The library that it
// means to call is left out; the functions at the end of this file stand in its place.
// What a thread keeps on its own stack counts as registers, and is passed over.

// The library itself, as it lies in memory.
#if defined(__APPLE__)
extern char image_start[] __asm("segment$start$__TEXT"), image_stop[] __asm("segment$end$__DATA");
#else
#include <link.h>
extern char image_start[] __asm__("__ehdr_start") HIDDEN;
static const char* image_stop;  // begin_trace finds it
#endif

namespace emulator {

enum Kind {
    LOAD = 0, STORE = 1, IN_SHARED = 2,
    UNWRITTEN = 4,  // a load of what nobody stored
    COPIED = 8,     // a store by a copy, when it begins or ends: no pass of its own
};

struct Event {
    uint64_t address;            // in shared memory: from its start
    unsigned place;              // of the instruction, from the start of the library
    unsigned block;              // counted in the order in which they run
    unsigned phase, warp_phase;  // how many __syncthreads() and __syncwarp() it has passed
    unsigned short thread;
    unsigned char bytes, kind;
};

constexpr int PHASES = 1024;  // the idle threads of so many are told one by one

struct Counters {
    long long blocks, barriers, idle_threads, thread_phases, tile_products;
    int threads_in_phase[PHASES], idle_in_phase[PHASES];  // summed over blocks
};
struct Range { uint64_t start, stop; };

constexpr size_t ENOUGH = 1 << 15;  // events, then Python takes them

static void (*take)(const Event*, size_t);
static const Range* buffers;  // what a kernel may touch of the global memory
static int buffer_count;      // 0: that is not known
static Counters counters;
static Event* events;
static size_t event_count, event_capacity;
static unsigned phase, warp_phases[MAX_THREADS / LANES];
static bool active[MAX_THREADS];  // since the last barrier
// For each byte of shared memory: has the block stored something, or is a copy on its way there?
enum Byte { EMPTY, STORED, AWAITED };
static unsigned char* stored;

// Static shared memory comes first, then the dynamic, whose start 128 divides.
UNTRACED static size_t static_bytes() { return (shared_stop - shared_start + 127) / 128 * 128; }
UNTRACED static size_t all_shared_bytes() { return static_bytes() + dynamic_bytes; }

UNTRACED static bool is_outside(uint64_t address, int bytes) {
    for (int i = 0; i < buffer_count; i++)
        if (address >= buffers[i].start && address + bytes <= buffers[i].stop) return false;
    return buffer_count > 0;
}

UNTRACED static void keep(const Event& event) {
    if (event_count == event_capacity) {
        size_t capacity = event_capacity ? 2 * event_capacity : 2 * ENOUGH;
        Event* more = (Event*)new_memory(capacity * sizeof(Event));
        if (!more) fail(0, "there is no memory for a trace of %zu accesses", capacity);
        if (events) memcpy(more, events, event_count * sizeof(Event));
        if (events) munmap(events, event_capacity * sizeof(Event));
        events = more, event_capacity = capacity;
    }
    events[event_count++] = event;
}

UNTRACED static void record(const void* pointer, int bytes, int kind, void* instruction) {
    const char* at = (const char*)pointer;
    if (!in_kernel || (at >= stacks && at < stacks + STACKS)) return;
    bool is_static = at >= shared_start && at < shared_stop;
    bool is_dynamic = at >= dynamic_shared && at < dynamic_shared + dynamic_bytes;
    if (at >= image_start && at < image_stop && !is_static) return;  // threadIdx, constants

    unsigned thread = threadIdx.x, place = (char*)instruction - image_start;
    Event event = {(uint64_t)at, place, unsigned(counters.blocks), phase,
                   warp_phases[thread / LANES], (unsigned short)thread, (unsigned char)bytes,
                   (unsigned char)kind};
    const char* verb = kind & STORE ? "stores" : "loads";
    failed.place = place;
    if (event.address % bytes)
        fail(0, "thread %u %s %d bytes at an address that %d does not divide", thread, verb, bytes,
             bytes);
    if (is_static || is_dynamic) {
        event.kind |= IN_SHARED;
        event.address = is_static ? at - shared_start : static_bytes() + (at - dynamic_shared);
        if (memchr(stored + event.address, AWAITED, bytes))
            fail(0, "thread %u %s %d bytes to which a copy is on its way. "
                 "Its own thread must wait for it first, then all at a barrier", thread, verb, bytes);
        if (kind & STORE) memset(stored + event.address, STORED, bytes);
        else if (memchr(stored + event.address, EMPTY, bytes)) event.kind |= UNWRITTEN;
    } else if (is_outside(event.address, bytes)) {
        fail(0, "thread %u %s %d bytes outside of all arrays", thread, verb, bytes);
    }
    active[thread] = true;
    keep(event);
}

// The begin of a copy, and its end. Between the two nobody may touch its place.
UNTRACED static void mark(const void* to, Byte what) {
    const char* at = (const char*)to;
    bool is_static = at >= shared_start && at < shared_stop;
    memset(stored + (is_static ? at - shared_start : static_bytes() + (at - dynamic_shared)), what, 16);
}
UNTRACED static void expect_copy(const void* to, void* instruction) {
    record(to, 16, STORE | COPIED, instruction);
    mark(to, AWAITED);
}
UNTRACED static void receive_copy(const void* to, void* instruction) {
    mark(to, STORED);
    record(to, 16, STORE | COPIED, instruction);
}

UNTRACED static void count_tile_product() {
    counters.tile_products += threadIdx.x % LANES == 0;
    active[threadIdx.x] = true;
}

UNTRACED static void end_warp_phase() { warp_phases[threadIdx.x / LANES]++; }

UNTRACED static void hand_over() {
    take(events, event_count);
    event_count = 0;
}

// A phase ends at a barrier, or with the block.
UNTRACED static void end_phase(bool is_last) {
    int idle = 0, size = blockDim.x;
    for (int i = 0; i < size; i++) idle += !active[i];
    if (idle < size) {  // nobody waits where there is no work at all
        counters.idle_threads += idle, counters.thread_phases += size;
        if (phase < PHASES)
            counters.idle_in_phase[phase] += idle, counters.threads_in_phase[phase] += size;
    }
    memset(active, 0, sizeof active);
    phase++, counters.barriers++;
    if (is_last) {
        counters.barriers--, counters.blocks++;
        phase = 0;
        memset(warp_phases, 0, sizeof warp_phases);
        memset(stored, 0, all_shared_bytes());
    }
    if (event_count > ENOUGH) hand_over();
}

UNTRACED static void begin_trace() {
#if !defined(__APPLE__)
    const ElfW(Ehdr)* header = (const ElfW(Ehdr)*)image_start;
    const ElfW(Phdr)* part = (const ElfW(Phdr)*)(image_start + header->e_phoff);
    for (int i = 0; i < header->e_phnum; i++)  // the last that is loaded is the highest
        if (part[i].p_type == PT_LOAD) image_stop = image_start + part[i].p_vaddr + part[i].p_memsz;
#endif
    counters = {}, phase = 0;
    memset(warp_phases, 0, sizeof warp_phases);
    memset(active, 0, sizeof active);
    stored = (unsigned char*)new_memory(all_shared_bytes());
    if (!stored) fail(0, "there is no memory for a trace");
}

UNTRACED static void end_trace(bool is_complete) {
    if (is_complete) hand_over();
    if (events) munmap(events, event_capacity * sizeof(Event));
    if (stored) munmap(stored, all_shared_bytes());
    events = nullptr, stored = nullptr;
    event_count = event_capacity = 0;
}

// Accesses of any size, as a GPU would make them: at most 16 bytes, at an address that they divide.
UNTRACED static void record_pieces(const void* pointer, size_t bytes, int kind, void* instruction) {
    const char *at = (const char*)pointer, *stop = at + bytes;
    while (at < stop) {
        int piece = 16;
        while (piece > stop - at || (uintptr_t)at % piece) piece /= 2;
        record(at, piece, kind, instruction);
        at += piece;
    }
}

}  // namespace emulator

// ---- What Python calls --------------------------------------------------------------------------

EXPORTED UNTRACED void trace_into(void (*take)(const emulator::Event*, size_t),
                                    const emulator::Range* buffers, int buffer_count) {
    emulator::take = take, emulator::buffers = buffers, emulator::buffer_count = buffer_count;
}
EXPORTED UNTRACED const emulator::Counters* trace_counters() { return &emulator::counters; }

// ---- What the compiler calls --------------------------------------------------------------------

#if defined(__APPLE__)
#define HOOK_PREFIX "___tsan_"
#else
#define HOOK_PREFIX "__tsan_"
#endif
#define HOOK(type, name, ...) \
    UNTRACED type hook_##name(__VA_ARGS__) __asm__(HOOK_PREFIX #name); \
    UNTRACED type hook_##name(__VA_ARGS__)
#define HERE __builtin_return_address(0)  // behind the call, in the kernel
#define LOADED(record, at, bytes) emulator::record(at, bytes, emulator::LOAD, HERE)
#define STORED(record, at, bytes) emulator::record(at, bytes, emulator::STORE, HERE)
#define HOOKS(bytes) \
    HOOK(void, read##bytes, void* at) { LOADED(record, at, bytes); } \
    HOOK(void, write##bytes, void* at) { STORED(record, at, bytes); } \
    HOOK(void, unaligned_read##bytes, void* at) { LOADED(record_pieces, at, bytes); } \
    HOOK(void, unaligned_write##bytes, void* at) { STORED(record_pieces, at, bytes); }

extern "C" {

HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16)
HOOK(void, read_range, void* at, size_t bytes) { LOADED(record_pieces, at, bytes); }
HOOK(void, write_range, void* at, size_t bytes) { STORED(record_pieces, at, bytes); }
HOOK(void*, memcpy, void* to, const void* from, size_t bytes) {
    LOADED(record_pieces, from, bytes);
    STORED(record_pieces, to, bytes);
    return memcpy(to, from, bytes);
}
HOOK(void*, memmove, void* to, const void* from, size_t bytes) {
    LOADED(record_pieces, from, bytes);
    STORED(record_pieces, to, bytes);
    return memmove(to, from, bytes);
}
HOOK(void*, memset, void* to, int value, size_t bytes) {
    STORED(record_pieces, to, bytes);
    return memset(to, value, bytes);
}
HOOK(void, init, void) {}
HOOK(void, func_entry, void*) {}
HOOK(void, func_exit, void) {}

}  // extern "C"
