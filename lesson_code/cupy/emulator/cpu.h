// CUDA C++ as far as the kernels use it, in C++17 for a CPU. _compiler.py puts it before a .cu file.
// Its last part, numbers and matrix tiles, is what gpu.h says in the GPU's own instructions.
//
// Each thread of a block is a fibre: a stack and a place in the code, both kept while others run.
// It runs until it ends or must wait for other threads; then the scheduler goes on with the next.
// Blocks run one after another. At any moment one thread runs, so whatever it needs may be global.

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

// ---- Words of the language ----------------------------------------------------------------------

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct dim3 { unsigned x, y, z; };
struct alignas(8) float2 { float x, y; };
struct alignas(8) uint2 { unsigned x, y; };
#if defined(__clang__)  // which would copy a struct number by number
typedef unsigned uint4 __attribute__((ext_vector_type(4)));
typedef float float4 __attribute__((ext_vector_type(4)));
#else
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
#endif

static dim3 threadIdx, blockIdx, blockDim, gridDim;

extern "C" {  // of the C library; <math.h> would ask for that of C++, too
float fmaf(float, float, float);
float expf(float);
float logf(float);
float fmaxf(float, float);
float fminf(float, float);
float fabsf(float);
}
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }

// Shared arrays become static variables, which the linker puts into a section of their own.
#if defined(__APPLE__)
#define SECTION "__DATA,shared_memory"
extern char shared_start[] __asm("section$start$__DATA$shared_memory");
extern char shared_stop[] __asm("section$end$__DATA$shared_memory");
#else
#define SECTION "shared_memory"
#define HIDDEN __attribute__((visibility("hidden")))
extern char shared_start[] __asm__("__start_shared_memory") HIDDEN;
extern char shared_stop[] __asm__("__stop_shared_memory") HIDDEN;
#endif
#define __shared__ static __attribute__((section(SECTION)))
#define dynamic_shared_memory(name) uint4* name = (uint4*)emulator::dynamic_shared

// ---- Words to the compiler ----------------------------------------------------------------------

// Functions that the thread sanitizer, which finds the accesses to be counted, leaves alone.
#define UNTRACED __attribute__((noinline, no_sanitize("thread")))

#if !defined(__has_feature)
#define __has_feature(name) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || __has_feature(address_sanitizer)
#define SANITIZED 1  // the address sanitizer must be told on which stack the program runs
extern "C" void __sanitizer_start_switch_fiber(void**, const void* stack, size_t bytes);
extern "C" void __sanitizer_finish_switch_fiber(void*, const void** old_stack, size_t* old_bytes);
extern "C" void __asan_unpoison_memory_region(const void* start, size_t bytes);
#define LEAVE_FOR(stack, bytes) __sanitizer_start_switch_fiber(nullptr, stack, bytes)
#define ARRIVE_FROM(stack, bytes) __sanitizer_finish_switch_fiber(nullptr, stack, bytes)
#define FORGET(stack, bytes) __asan_unpoison_memory_region(stack, bytes)
#else
#define SANITIZED 0
#define LEAVE_FOR(stack, bytes) (void)0
#define ARRIVE_FROM(stack, bytes) (void)0
#define FORGET(stack, bytes) (void)0
#endif

#define EXPORTED extern "C" __attribute__((visibility("default")))

// ---- Threads ------------------------------------------------------------------------------------

namespace emulator {

constexpr int LANES = 32, MAX_THREADS = 1024;

// The memory of a launch, in bytes: a guard that may not be touched, a stack, a guard, a stack ...
// a guard, and the dynamic shared memory, which ends where the last guard begins.
constexpr size_t GUARD = 64 << 10, STACK = 64 << 10, STACKS = MAX_THREADS * (GUARD + STACK);
constexpr size_t DYNAMIC = 256 << 10, MEMORY = STACKS + GUARD + DYNAMIC + GUARD;

enum State { READY, AT_BARRIER, AT_WARP_OPERATION, ENDED };
typedef void (*Operation)(void** operands, int lanes);

struct Thread {
    State state;
    bool has_begun;
    jmp_buf place;        // where it waits
    int line;             // the same, as a line of the .cu file
    Operation operation;  // what its warp is to do together ...
    void* operand;        // ... and what it gives and takes
};

static Thread threads[MAX_THREADS];
static Thread* current;
static bool in_kernel;  // whether the kernel's own code runs now, or the scheduler
static jmp_buf scheduler, failure;

static void (*kernel)(void** arguments);
static void** arguments;
static char *stacks, *dynamic_shared;
static size_t dynamic_bytes;

static const void* scheduler_stack;  // known to the address sanitizer
static size_t scheduler_bytes;

// What ended a launch: a sentence, and where in the .cu file, by line or by address.
struct Failure { char sentence[400]; dim3 block; int line; unsigned place; };
static Failure failed;

[[noreturn]] UNTRACED static void fail(int line, const char* format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(failed.sentence, sizeof failed.sentence, format, values);
    va_end(values);
    failed.line = line;
    if (in_kernel) LEAVE_FOR(scheduler_stack, scheduler_bytes);
    _longjmp(failure, 1);
}

UNTRACED static void* new_memory(size_t bytes) {
    int access = PROT_READ | PROT_WRITE, kind = MAP_PRIVATE | MAP_ANON;
    void* start = mmap(nullptr, bytes, access, kind, -1, 0);
    return start == MAP_FAILED ? nullptr : start;
}

}  // namespace emulator

#ifdef TRACED
#include "cpu_trace.h"
#else
namespace emulator {
enum { LOAD };
static void record(const void*, int, int, void*) {}
static void expect_copy(const void*, void*) {}
static void receive_copy(const void*, void*) {}
static void count_tile_product() {}
static void end_warp_phase() {}
static void end_phase(bool) {}
static void begin_trace() {}
static void end_trace(bool) {}
}  // namespace emulator
#endif

namespace emulator {

// To the scheduler, and back when it is this thread's turn again.
UNTRACED static void wait() {
    in_kernel = false;
    if (!_setjmp(current->place)) {
        LEAVE_FOR(scheduler_stack, scheduler_bytes);
        _longjmp(scheduler, 1);
    }
    ARRIVE_FROM(nullptr, nullptr);
    in_kernel = true;
}

// What runs on a stack: a thread of one block, the same thread of the next ...
UNTRACED static void fibre() {
    ARRIVE_FROM(&scheduler_stack, &scheduler_bytes);
    for (;;) {
        in_kernel = true;
        kernel(arguments);
        current->state = ENDED;
        wait();
    }
}

// From the scheduler to a thread, and back when that must wait.
UNTRACED static void resume(int index) {
    current = &threads[index];
    threadIdx.x = index;
    char* stack = stacks + index * (GUARD + STACK) + GUARD;
    if (_setjmp(scheduler)) {
        ARRIVE_FROM(nullptr, nullptr);
        return;
    }
    if (!current->has_begun) FORGET(stack, STACK);
    LEAVE_FOR(stack, STACK);
    if (current->has_begun) _longjmp(current->place, 1);
    current->has_begun = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = STACK;
    context.uc_link = nullptr;
    makecontext(&context, fibre, 0);
    setcontext(&context);
}

// ---- The scheduler ------------------------------------------------------------------------------

static long long order;  // 0: forward, 1: in reverse, others: shuffled
static uint64_t random_bits;

// The order in which what is numbered 0 .. count - 1 has its turns.
struct Turns {
    long long start, step, count;
    long long operator[](long long i) const { return (start + i * step) % count; }
};

static Turns take_turns(long long count) {
    if (order == 0 || count == 1) return {0, 1, count};
    if (order == 1) return {count - 1, count - 1, count};  // a step of -1
    auto draw = [&] {
        random_bits = random_bits * 6364136223846793005u + 1442695040888963407u;
        return (long long)(random_bits >> 33) % count;
    };
    auto common_divisor = [](long long a, long long b) {
        while (b) {
            long long rest = a % b;
            a = b, b = rest;
        }
        return a;
    };
    Turns turns = {draw(), draw(), count};
    while (common_divisor(turns.step, count) > 1) turns.step++;  // or some would have two turns
    return turns;
}

static int count(State state, int first, int stop) {
    int number = 0;
    for (int i = first; i < stop; i++) number += threads[i].state == state;
    return number;
}

static int find(State state, int first) {
    while (threads[first].state != state) first++;
    return first;
}

// Runs the threads of a warp until each has ended or waits at a barrier.
// What they can only do together is done here, when all of them wait for it.
UNTRACED static void run_warp(int first, int lanes) {
    Turns turns = take_turns(lanes);
    for (;;) {
        for (int i = 0; i < lanes; i++)
            if (threads[first + turns[i]].state == READY) resume(first + turns[i]);
        int waiting = count(AT_WARP_OPERATION, first, first + lanes);
        if (!waiting) return;
        Thread& one = threads[find(AT_WARP_OPERATION, first)];
        if (waiting < lanes)
            fail(one.line, "only %d of the %d threads of warp %d reach this warp operation; "
                 "%d wait at __syncthreads(), %d have ended. All must take part",
                 waiting, lanes, first / LANES, count(AT_BARRIER, first, first + lanes),
                 count(ENDED, first, first + lanes));
        void* operands[LANES];
        for (int i = 0; i < lanes; i++) {
            Thread& thread = threads[first + i];
            if (thread.operation != one.operation)
                fail(thread.line, "threads of warp %d wait at different operations, "
                     "here and in line %d. All must do the same", first / LANES, one.line);
            operands[i] = thread.operand;
            thread.state = READY;
        }
        one.operation(operands, lanes);
    }
}

static void forget_copies();
static void check_copies();

// Runs one warp after the other up to the next barrier, again and again.
// New GPUs do not wait at a barrier for threads that have ended. Others might: here it is an error.
UNTRACED static void run_block() {
    int size = blockDim.x, warps = (size + LANES - 1) / LANES;
    // What nobody has written is NaN, in every format of floating-point numbers.
    if (!SANITIZED) memset(shared_start, 0xff, shared_stop - shared_start);
    memset(dynamic_shared, 0xff, dynamic_bytes);
    for (int i = 0; i < size; i++) threads[i].state = READY;
    forget_copies();
    for (;;) {
        Turns turns = take_turns(warps);
        for (int i = 0; i < warps; i++) {
            int first = turns[i] * LANES;
            run_warp(first, min(LANES, size - first));
        }
        int ended = count(ENDED, 0, size);
        end_phase(ended == size);
        if (ended == size) return check_copies();
        Thread& one = threads[find(AT_BARRIER, 0)];
        if (ended)
            fail(one.line, "%d threads wait at __syncthreads(), but %d of the block's %d have "
                 "ended. All must reach each barrier", size - ended, ended, size);
        for (int i = 0; i < size; i++) {
            if (threads[i].line != one.line)
                fail(threads[i].line, "threads of one block wait at different barriers, "
                     "here and in line %d", one.line);
            threads[i].state = READY;
        }
    }
}

UNTRACED static void run_grid() {
    for (Thread& thread : threads) thread.has_begun = false;
    begin_trace();
    Turns turns = take_turns(1LL * gridDim.x * gridDim.y * gridDim.z);
    for (long long i = 0; i < turns.count; i++) {
        long long number = turns[i];
        blockIdx.x = number % gridDim.x;
        blockIdx.y = number / gridDim.x % gridDim.y;
        blockIdx.z = number / gridDim.x / gridDim.y;
        run_block();
    }
}

// ---- What threads do together -------------------------------------------------------------------

UNTRACED static void with_warp(Operation operation, void* operand, int line) {
    current->state = AT_WARP_OPERATION;
    current->operation = operation;
    current->operand = operand;
    current->line = line;
    wait();
}

UNTRACED static void meet(void**, int) { end_warp_phase(); }

struct Exchange { unsigned mine, source, result; };

UNTRACED static void exchange(void** operands, int lanes) {
    for (int lane = 0; lane < lanes; lane++) {
        Exchange* it = (Exchange*)operands[lane];
        if (it->source >= unsigned(lanes))
            fail(current->line, "lane %d asks lane %u, which is not there", lane, it->source);
        it->result = ((Exchange*)operands[it->source])->mine;
    }
}

template <typename To, typename From> inline To same_bits(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    __builtin_memcpy(&y, &x, sizeof y);
    return y;
}

static void check_mask(unsigned mask, int line) {
    if (mask != ~0u) fail(line, "the mask of lanes must be 0xffffffff, all, got 0x%08x", mask);
}

template <typename T> UNTRACED static T shuffle(unsigned mask, T value, unsigned lane, int line) {
    check_mask(mask, line);
    Exchange it = {same_bits<unsigned>(value), lane, 0};
    with_warp(exchange, &it, line);
    return same_bits<T>(it.result);
}

}  // namespace emulator

UNTRACED static void __syncthreads(int line = __builtin_LINE()) {
    emulator::current->state = emulator::AT_BARRIER;
    emulator::current->line = line;
    emulator::wait();
}
UNTRACED static void __syncwarp(unsigned mask = ~0u, int line = __builtin_LINE()) {
    emulator::check_mask(mask, line);
    emulator::with_warp(emulator::meet, nullptr, line);
}
template <typename T> T __shfl_sync(unsigned mask, T value, int lane, int line = __builtin_LINE()) {
    return emulator::shuffle(mask, value, lane % 32u, line);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int line = __builtin_LINE()) {
    return emulator::shuffle(mask, value, threadIdx.x % 32 ^ lanes, line);
}

// ---- Numbers of 16 bits -------------------------------------------------------------------------

inline unsigned __float_as_uint(float x) { return emulator::same_bits<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return emulator::same_bits<float>(x); }

struct float16 { unsigned short bits; };   // 1 of the sign, 5 of the exponent, 10 of the fraction
struct bfloat16 { unsigned short bits; };  // 1, 8 and 7: the upper half of a float

inline float to_float(float x) { return x; }
inline float to_float(bfloat16 x) { return __uint_as_float(unsigned(x.bits) << 16); }
inline float to_float(float16 x) {
    unsigned sign = (x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
    if (rest < 0x0400) rest = __float_as_uint(rest * 0x1p-24f);  // zero, and subnormal numbers
    else if (rest < 0x7c00) rest = (rest << 13) + (112u << 23);  // 112 = 127 - 15 in the exponent
    else rest = rest << 13 | 0x7f800000u;                        // infinity, NaN
    return __uint_as_float(sign | rest);
}

// To the nearest number, of two that are equally near to the one that ends in a zero bit: half of
// the last bit that stays is added, less a tiny bit if that one is 0, and what is below is cut off.
template <typename T> T from_float(float x);
template <> inline float from_float(float x) { return x; }
template <> inline bfloat16 from_float(float x) {
    unsigned bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};  // NaN
    return {(unsigned short)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16)};
}
// Not inline: g++ would repeat the store that follows in each branch, and a trace count them all.
UNTRACED static unsigned short float16_bits(float x) {
    unsigned sign = __float_as_uint(x) >> 16 & 0x8000u, rest = __float_as_uint(x) & 0x7fffffffu;
    if (rest > 0x7f800000u) rest = 0x7fff;                       // NaN
    else if (rest >= 0x477ff000u) rest = 0x7c00;                 // from 65520 on: infinity
    else if (rest >= 0x38800000u) rest = (rest - (112u << 23) + 0xfffu + (rest >> 13 & 1)) >> 13;
    // Subnormal numbers are 2^-24 apart, and so are floats from 0.5 to 1: adding 0.5 rounds.
    else rest = __float_as_uint(__uint_as_float(rest) + 0.5f) - __float_as_uint(0.5f);
    return sign | rest;
}
template <> inline float16 from_float(float x) { return {float16_bits(x)}; }

template <typename T> unsigned pack(float low, float high) {
    return from_float<T>(low).bits | unsigned(from_float<T>(high).bits) << 16;
}

// ---- Matrix tiles: ldmatrix and mma.m16n8k16, in the layouts of the PTX manual ------------------

namespace emulator {

struct Matrices { unsigned* registers; const void* row; };

// Lane i has given the address of row i % 8 of matrix i / 8. Of each matrix a lane takes two
// neighbors, in row lane / 4 from column lane % 4 * 2 on; TRANSPOSED, of the transposed matrix.
template <bool TRANSPOSED> UNTRACED static void load_four(void** operands, int lanes) {
    if (lanes < LANES) fail(current->line, "a warp of %d threads cannot load matrices", lanes);
    for (int lane = 0; lane < LANES; lane++)
        for (int matrix = 0; matrix < 4; matrix++) {
            unsigned pair = 0;
            for (int next = 0; next < 2; next++) {
                int i = lane / 4, j = lane % 4 * 2 + next;
                Matrices* row = (Matrices*)operands[8 * matrix + (TRANSPOSED ? j : i)];
                pair |= unsigned(((unsigned short*)row->row)[TRANSPOSED ? i : j]) << 16 * next;
            }
            ((Matrices*)operands[lane])->registers[matrix] = pair;
        }
}

UNTRACED static bool is_shared(const void* pointer, size_t bytes) {
    const char *start = (const char*)pointer, *stop = start + bytes;
    return (start >= shared_start && stop <= shared_stop)
        || (start >= dynamic_shared && stop <= dynamic_shared + dynamic_bytes);
}

UNTRACED static void load(unsigned* registers, const void* row, Operation operation, int line,
                          void* instruction) {
    if (!is_shared(row, 16) || (uintptr_t)row % 16)
        fail(line, "thread %u gives load_matrices a row that is not %s", threadIdx.x,
             is_shared(row, 16) ? "aligned to 16 bytes" : "in shared memory");
    record(row, 16, LOAD, instruction);
    Matrices it = {registers, row};
    with_warp(operation, &it, line);
}

struct Product { float* c; const unsigned* a; unsigned b[2]; };

template <typename T> UNTRACED static void multiply(void** operands, int lanes) {
    if (lanes < LANES) fail(current->line, "a warp of %d threads cannot multiply tiles", lanes);
    typedef float Row __attribute__((vector_size(32)));  // 8 numbers, added and multiplied at once
    float a[16][16];
    Row b[16], c[16];
    for (int lane = 0; lane < LANES; lane++) {
        const Product* it = (Product*)operands[lane];
        int group = lane / 4;
        for (int next = 0; next < 2; next++) {
            int pair = lane % 4 * 2 + next;
            auto half = [&](unsigned r) { return to_float(T{(unsigned short)(r >> 16 * next)}); };
            for (int i = 0; i < 4; i++) a[group + i % 2 * 8][pair + i / 2 * 8] = half(it->a[i]);
            for (int i = 0; i < 2; i++) b[pair + i * 8][group] = half(it->b[i]);
            for (int i = 0; i < 2; i++) c[group + i * 8][pair] = it->c[2 * i + next];
        }
    }
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < 16; k++) c[i] += a[i][k] * b[k];
    for (int lane = 0; lane < LANES; lane++)
        for (int i = 0; i < 4; i++)
            ((Product*)operands[lane])->c[i] = c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
}

}  // namespace emulator

UNTRACED static void load_matrices(unsigned (&r)[4], const void* row, int line = __builtin_LINE()) {
    emulator::load(r, row, emulator::load_four<false>, line, __builtin_return_address(0));
}
UNTRACED static void load_matrices_transposed(unsigned (&r)[4], const void* row,
                                              int line = __builtin_LINE()) {
    emulator::load(r, row, emulator::load_four<true>, line, __builtin_return_address(0));
}

// c += a b: a is 16x16, b 16x8, c 16x8 in float32.
template <typename T>
UNTRACED static void multiply_tiles(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1,
                                    int line = __builtin_LINE()) {
    emulator::count_tile_product();
    emulator::Product it = {c, a, {b0, b1}};
    emulator::with_warp(emulator::multiply<T>, &it, line);
}

// ---- Copies that land later ---------------------------------------------------------------------

// A copy writes its place at some time before the wait that it is waited for by: here, in that very
// moment. Until then the place is NaN, and a trace takes whatever touches it for an error.
namespace emulator {

constexpr int MOST_COPIES = 192;  // of one thread, on their way at a time

struct Copy { char* to; const char* from; int group; };
struct Copies { int count, groups; Copy list[MOST_COPIES]; };
static Copies copies[MAX_THREADS];

UNTRACED static void land(int groups, void* instruction) {
    Copies& own = copies[threadIdx.x];
    int left = 0;
    for (int i = 0; i < own.count; i++) {
        Copy it = own.list[i];
        if (it.group >= groups) {
            own.list[left++] = it;
            continue;
        }
        receive_copy(it.to, instruction);
        memcpy(it.to, it.from, 16);
    }
    own.count = left;
}

UNTRACED static void forget_copies() {
    for (Copies& own : copies) own.count = own.groups = 0;
}

UNTRACED static void check_copies() {
    for (unsigned i = 0; i < blockDim.x; i++)
        if (copies[i].count) fail(0, "thread %u ends while %d of its copies are on their way", i, copies[i].count);
}

}  // namespace emulator

UNTRACED static void copy_async(void* to, const void* from, int line = __builtin_LINE()) {
    using namespace emulator;
    Copies& own = copies[threadIdx.x];
    if (!is_shared(to, 16) || (uintptr_t)to % 16 || (uintptr_t)from % 16)
        fail(line, "thread %u copies sixteen bytes %s", threadIdx.x,
             is_shared(to, 16) ? "from or to an address that 16 does not divide"
                               : "to a place that is not in shared memory");
    if (own.count == MOST_COPIES)
        fail(line, "thread %u has %d copies on their way and waits for none", threadIdx.x, own.count);
    record(from, 16, LOAD, __builtin_return_address(0));
    expect_copy(to, __builtin_return_address(0));
    memset(to, 0xff, 16);
    own.list[own.count++] = {(char*)to, (const char*)from, own.groups};
}
UNTRACED static void end_group() { emulator::copies[threadIdx.x].groups++; }
template <int MORE> UNTRACED static void wait_for_groups() {
    emulator::land(emulator::copies[threadIdx.x].groups - MORE, __builtin_return_address(0));
}

template <typename T> unsigned scale_pair(unsigned pair, float factor) {
    return pack<T>(to_float(T{(unsigned short)pair}) * factor,
                   to_float(T{(unsigned short)(pair >> 16)}) * factor);
}

// ---- Launches, from Python ----------------------------------------------------------------------

namespace emulator {

// A kernel as Python calls it, with an array of the addresses of its arguments.
template <auto f> struct Call;
template <typename... A, void (*f)(A...)> struct Call<f> {
    static constexpr int count = sizeof...(A), sizes[] = {int(sizeof(A))..., 0};
    UNTRACED Call(A... arguments) { f(arguments...); }
    UNTRACED static void with(void** values) {
        int i = 0;
        Call{*(A*)values[i++]...};  // in their order, as braces promise
    }
};

struct Kernel {
    const char* name;
    void (*call)(void**);
    const int* sizes;  // of its arguments, in bytes
    int count, max_threads;
};

// What __launch_bounds__ says: at most so many threads, and at least so many blocks at a time.
constexpr int most_threads(int threads = MAX_THREADS, int = 0) { return threads; }

#define EMULATED_KERNEL(name, ...) \
    {#name, emulator::Call<name>::with, emulator::Call<name>::sizes, \
     emulator::Call<name>::count, emulator::most_threads(__VA_ARGS__)}
#define EMULATED_KERNELS(...) \
    EXPORTED const emulator::Kernel emulated_kernels[] = {__VA_ARGS__}; \
    EXPORTED const int emulated_kernel_count = \
        sizeof emulated_kernels / sizeof *emulated_kernels;

__shared__ __align__(128) char at_least_one[128] __attribute__((used));  // it aligns the section

// A wrong address ends the launch, not the process. So does Ctrl-C, after Python has noted it.
constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGINT};
static struct sigaction before[4];
static pthread_t runner;

UNTRACED static void on_signal(int number, siginfo_t* info, void*) {
    bool is_ours = in_kernel && pthread_equal(pthread_self(), runner);
    int i = 0;
    while (SIGNALS[i] != number) i++;
    if (number == SIGINT) before[i].sa_handler(number);
    else if (!is_ours) sigaction(number, &before[i], nullptr);  // and it will happen again
    if (!is_ours) return;
    const char* at = (const char*)info->si_addr;
    unsigned thread = threadIdx.x;
    if (number == SIGINT) fail(0, "interrupted");
    if (number == SIGFPE) fail(0, "thread %u divides an integer by zero", thread);
    if (at >= stacks && at < stacks + STACKS)
        fail(0, "thread %u needs more than %zu bytes for its local arrays", thread, STACK);
    if (at >= stacks && at < stacks + MEMORY)
        fail(0, "thread %u reaches beyond the dynamic shared memory", thread);
#if defined(SI_KERNEL)
    if (info->si_code == SI_KERNEL)  // Linux does not tell which
        fail(0, "thread %u uses an address that is misaligned, or none of any memory", thread);
#endif
    fail(0, "thread %u reaches for the address %p, where no array lies", thread, (const void*)at);
}

UNTRACED static void catch_signals(bool start) {
    static char signal_stack[64 << 10];  // for when the thread's own is full
    static stack_t stack_before;
    stack_t stack = {};
    stack.ss_sp = signal_stack, stack.ss_size = sizeof signal_stack;
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    runner = pthread_self();
    if (start) sigaltstack(&stack, &stack_before);
    for (int i = 0; i < 4; i++) {
        if (start) sigaction(SIGNALS[i], nullptr, &before[i]);
        bool python_listens = before[i].sa_handler != SIG_DFL && before[i].sa_handler != SIG_IGN;
        if (SIGNALS[i] == SIGINT && !python_listens) continue;
        sigaction(SIGNALS[i], start ? &action : &before[i], nullptr);
    }
    if (!start) sigaltstack(&stack_before, nullptr);
}

}  // namespace emulator

EXPORTED UNTRACED char* new_launch_memory() {
    using namespace emulator;
    char* start = (char*)new_memory(MEMORY);
    if (!start) return nullptr;
    for (size_t at = 0; at <= STACKS; at += GUARD + STACK) mprotect(start + at, GUARD, PROT_NONE);
    mprotect(start + MEMORY - GUARD, GUARD, PROT_NONE);
    return start;
}

// Runs a kernel; returns nullptr, or what went wrong.
EXPORTED UNTRACED const emulator::Failure* launch_kernel(
        const emulator::Kernel* it, void** values, dim3 grid, int threads, size_t shared_bytes,
        long long which_order, char* memory) {
    using namespace emulator;
    kernel = it->call, arguments = values;
    gridDim = grid, blockDim = {unsigned(threads), 1, 1}, threadIdx = {};
    order = random_bits = which_order;
    stacks = memory;
    dynamic_shared = memory + MEMORY - GUARD - (shared_bytes + 127) / 128 * 128;
    dynamic_bytes = shared_bytes;
    failed = {};
    if (!SANITIZED) catch_signals(true);  // the sanitizers do that themselves
    if (!_setjmp(failure)) run_grid();
    else if (in_kernel) ARRIVE_FROM(nullptr, nullptr);
    in_kernel = false;
    if (!SANITIZED) catch_signals(false);
    end_trace(!failed.sentence[0]);
    failed.block = blockIdx;
    return failed.sentence[0] ? &failed : nullptr;
}
