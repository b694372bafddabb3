// Rows times a packed weight, on CPUs with AVX2 (and FMA) and nothing wider. What engine/products.py calls.
//
// A weight [N, K] lies in panels of 16 outputs, in each of them k after k; a step of one k is then one or two loads:
//
//     float32     | w[0..7][k]  | w[8..15][k] |        64 bytes
//     bfloat16    | w[j+8][k] w[j][k], j 0..7 |        32 bytes: the upper and the lower half of eight words
//
// A bfloat16 is the upper half of a float32, so a shift and a mask widen sixteen of them; the bytes that a step of
// decoding reads are those of bfloat16, and sums are float32.
//
// Every output is one chain of fused multiply-adds over k = 0, 1, ... K - 1, whatever the number of rows, of panels
// that are computed together, or of threads. So rows do not see each other, and no case has other bits.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr long WIDTH = 16;              // outputs of a panel
constexpr long TOGETHER = 4;            // panels that rows go through before the next ones do
constexpr long CACHED = 384 * 1024;     // bytes of rows that stay in the second level cache while panels go by

struct Two { __m256 first, second; };

inline float widen(uint16_t half) {
    uint32_t word = uint32_t(half) << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
}

// To the nearest, ties to even, as torch rounds; what is no number stays none.
inline uint16_t narrow(float value) {
    uint32_t word;
    std::memcpy(&word, &value, 4);
    if (value != value) return 0x7fc0;
    return uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

struct Float32 {
    using Element = float;
    using Word = float;
    static constexpr long STEP = 16;    // words of a panel for one k
    static Two load(const Word* at) { return {_mm256_load_ps(at), _mm256_load_ps(at + 8)}; }
    static float read(Element value) { return value; }
    static Element round(float value) { return value; }
    static void put(Word* panel, long k, long output, Element value) { panel[k * STEP + output] = value; }
};

struct BFloat16 {
    using Element = uint16_t;
    using Word = uint32_t;
    static constexpr long STEP = 8;
    static Two load(const Word* at) {
        __m256i words = _mm256_load_si256(reinterpret_cast<const __m256i*>(at));
        return {_mm256_castsi256_ps(_mm256_slli_epi32(words, 16)),
                _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(int(0xffff0000))))};
    }
    static float read(Element value) { return widen(value); }
    static Element round(float value) { return narrow(value); }
    static void put(Word* panel, long k, long output, Element value) {
        panel[k * STEP + output % 8] |= uint32_t(value) << (output < 8 ? 0 : 16);
    }
};

// ROWS rows through PANELS panels: 2 * ROWS * PANELS chains, which must fit into sixteen registers with their factors.
template <class T, int ROWS, int PANELS>
inline void tile(const float* x, long inner, const typename T::Word* weight, float (*out)[PANELS * WIDTH]) {
    Two chains[ROWS][PANELS];
    for (auto& row : chains)
        for (Two& chain : row) chain = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (long k = 0; k < inner; k++)
        for (int p = 0; p < PANELS; p++) {
            Two factors = T::load(weight + (p * inner + k) * T::STEP);
            for (int r = 0; r < ROWS; r++) {
                __m256 value = _mm256_broadcast_ss(x + r * inner + k);
                chains[r][p].first = _mm256_fmadd_ps(value, factors.first, chains[r][p].first);
                chains[r][p].second = _mm256_fmadd_ps(value, factors.second, chains[r][p].second);
            }
        }
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++) {
            _mm256_storeu_ps(out[r] + p * WIDTH, chains[r][p].first);
            _mm256_storeu_ps(out[r] + p * WIDTH + 8, chains[r][p].second);
        }
}

template <class T>
struct Product {
    using Element = typename T::Element;
    using Word = typename T::Word;

    const Element* x;       // [rows, inner]
    const Word* weight;     // [panels][inner][STEP], 32-byte aligned
    const float* bias;      // [panels * WIDTH], or null
    Element* out;           // [rows, panels * WIDTH]
    long rows, inner, panels;

    template <int ROWS, int PANELS>
    void part(const float* wide, long row, long panel) const {
        float sums[ROWS][PANELS * WIDTH];
        tile<T, ROWS, PANELS>(wide, inner, weight + panel * inner * T::STEP, sums);
        for (int r = 0; r < ROWS; r++) {
            Element* to = out + (row + r) * panels * WIDTH + panel * WIDTH;
            const float* add = bias ? bias + panel * WIDTH : nullptr;
            for (long n = 0; n < PANELS * WIDTH; n++) to[n] = T::round(add ? sums[r][n] + add[n] : sums[r][n]);
        }
    }

    template <int ROWS, int PANELS>
    void each(const float* wide, long row, long first, long end) const {
        for (; first + PANELS <= end; first += PANELS) part<ROWS, PANELS>(wide, row, first);
        for (; first < end; first++) part<ROWS, 1>(wide, row, first);
    }

    // The fewer rows, the more panels at once: about eight chains hide the latency of an FMA.
    void group(const float* wide, long row, long count, long first, long end) const {
        for (; count >= 4; count -= 4, row += 4, wide += 4 * inner) each<4, 1>(wide, row, first, end);
        if (count == 3) each<3, 1>(wide, row, first, end);
        if (count == 2) each<2, 2>(wide, row, first, end);
        if (count == 1) each<1, 4>(wide, row, first, end);
    }

    // A thread's share: some groups of panels, all rows, as many at a time as stay in the cache.
    void share(long first, long end) const {
        long most = std::max(4L, CACHED / (4 * inner) / 4 * 4);
        std::vector<float> wide(std::min(most, rows) * inner);
        for (long row = 0; row < rows; row += most) {
            long count = std::min(most, rows - row);
            const Element* from = x + row * inner;
            for (long at = 0; at < count * inner; at++) wide[at] = T::read(from[at]);
            for (long panel = first; panel < end; panel += TOGETHER)
                group(wide.data(), row, count, panel, std::min(panel + TOGETHER, end));
        }
    }

    void run(int threads) const {
        #pragma omp parallel for num_threads(threads) schedule(static, 1)
        for (int t = 0; t < threads; t++) share(panels * t / threads, panels * (t + 1) / threads);
    }
};

template <class T>
void pack(const typename T::Element* weight, typename T::Word* packed, long outputs, long inner) {
    for (long n = 0; n < outputs; n++) {
        auto* panel = packed + n / WIDTH * inner * T::STEP;
        for (long k = 0; k < inner; k++) T::put(panel, k, n % WIDTH, weight[n * inner + k]);
    }
}

template <class P>
P* pointer(unsigned long long address) { return reinterpret_cast<P*>(static_cast<uintptr_t>(address)); }

// pack(half, weight, packed, outputs, inner): addresses of [outputs, inner] and of zeros
PyObject* py_pack(PyObject*, PyObject* args) {
    int half;
    unsigned long long weight, packed;
    long outputs, inner;
    if (!PyArg_ParseTuple(args, "pKKll", &half, &weight, &packed, &outputs, &inner)) return nullptr;
    Py_BEGIN_ALLOW_THREADS
    if (half) pack<BFloat16>(pointer<const uint16_t>(weight), pointer<uint32_t>(packed), outputs, inner);
    else pack<Float32>(pointer<const float>(weight), pointer<float>(packed), outputs, inner);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

// multiply(half, x, packed, bias or 0, out, rows, inner, panels, threads): addresses, as in Product
PyObject* py_multiply(PyObject*, PyObject* args) {
    int half, threads;
    unsigned long long x, weight, bias, out;
    long rows, inner, panels;
    if (!PyArg_ParseTuple(args, "pKKKKllli", &half, &x, &weight, &bias, &out, &rows, &inner, &panels, &threads))
        return nullptr;
    Py_BEGIN_ALLOW_THREADS
    if (half)
        Product<BFloat16>{pointer<const uint16_t>(x), pointer<const uint32_t>(weight), pointer<const float>(bias),
                          pointer<uint16_t>(out), rows, inner, panels}.run(threads);
    else
        Product<Float32>{pointer<const float>(x), pointer<const float>(weight), pointer<const float>(bias),
                         pointer<float>(out), rows, inner, panels}.run(threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyMethodDef METHODS[] = {
    {"pack", py_pack, METH_VARARGS, nullptr},
    {"multiply", py_multiply, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_panels", nullptr, -1, METHODS, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__panels() { return PyModule_Create(&MODULE); }
