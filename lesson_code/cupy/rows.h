// An array (..., N, width) in memory: the vectors of N tokens for every head. _arrays.py fills it in.
template <typename T> struct Rows {
    T* data;                        // token 0 of head 0
    long long outer, inner, token;  // distances, counted in numbers: between heads, and between tokens
    int inner_count, width;
    int ones;                       // columns of ones that are thought behind the others
    int padding;

    // The rows of one head, to be asked for once: a GPU takes long for a quotient of integers.
    __device__ __forceinline__ Rows of_head(int head) const {
        Rows rows = *this;
        rows.data += head / inner_count * outer + head % inner_count * inner;
        return rows;
    }
    __device__ __forceinline__ T* row(int t) const { return data + t * token; }
    __device__ __forceinline__ float number(int t, int column) const {
        return column < width ? to_float(row(t)[column]) : column < width + ones ? 1.0f : 0.0f;
    }
};

// An output whose normalizer is 0 is 0.
__device__ __forceinline__ float divide(float a, float b) { return b == 0.0f ? 0.0f : a / b; }
