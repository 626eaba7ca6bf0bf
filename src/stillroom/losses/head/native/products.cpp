// The products of a head from BF16 parts with FP32 sums and FP32 results, for CPUs with AVX512-BF16.
//
// Operands come as FP32 (or BF16) and are rounded while they are packed: no second copy of a weight is kept. An operand
// of two parts is the rounded value and the rounded rest, which together hold 16 bits: their product leaves out low
// times low alone. Sums are FP32 throughout; the unit treats subnormal numbers as 0.
//
// A tile is 8 rows by 48 columns: 24 registers of sums, 3 of B, one of A. B is packed in panels of 48 columns whose
// 32-bit lanes hold two neighbours along the sum. What a thread works on at a time fits its second-level cache.
//
// Legend: C positions, V vocabulary, D width, `pairs` steps of two along the sum.

#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define STILLROOM_HAS_BF16 1
#include <immintrin.h>
#include <omp.h>
#else
#define STILLROOM_HAS_BF16 0
#endif

namespace {

// Mirrored field by field in kernel.py.
struct Operand {
    const void* values;
    int64_t stride;   // of rows, in elements
    int32_t is_bf16;  // else FP32
    int32_t parts;    // 1 or 2
};

struct ProductJob {
    Operand hidden;    // [C, D]
    Operand weight;    // [V, D]
    float* logits;     // [C, stride]: written by 0, read as the gradient by 1 and 2
    int64_t logits_stride;
    float* out;        // [C, D] of 1, [V, D] of 2
    int64_t out_stride;
    int64_t num_rows, num_tokens, width, num_threads;
    int32_t form;      // 0 logits = hidden weight^T | 1 out = gradient weight | 2 out = gradient^T hidden
    int32_t adds;      // of 2: on top of what is there
};

#if STILLROOM_HAS_BF16

constexpr int64_t kRows = 8, kColumns = 48, kVectors = kColumns / 16;
constexpr int64_t kSumBlock = 512;     // steps along the sum that are packed at a time
constexpr int64_t kTokenBlock = 192;   // tokens of the weight's gradient that are packed at a time
constexpr int64_t kSampledRows = 1024; // of a weight, for what its rows have in common

inline int64_t up(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

// 64-byte aligned scratch.
class Scratch {
  public:
    explicit Scratch(int64_t count) : memory_(count + 32) {
        const auto address = reinterpret_cast<uintptr_t>(memory_.data());
        start_ = memory_.data() + (64 - address % 64) % 64 / sizeof(uint16_t);
    }
    uint16_t* data() { return start_; }

  private:
    std::vector<uint16_t> memory_;
    uint16_t* start_;
};

inline __mmask16 first(int64_t count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1); }

// `count` of 16 neighbours as FP32, the others 0.
inline __m512 load(const float* values, int64_t count) { return _mm512_maskz_loadu_ps(first(count), values); }
inline __m512 load(const uint16_t* values, int64_t count) {
    const __m256i bits = _mm256_maskz_loadu_epi16(first(count), values);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// A BF16 value in the low half of each 32-bit lane.
inline __m512i rounded(__m512 values) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(values)); }
inline __m512 widened(__m512i halves) { return _mm512_castsi512_ps(_mm512_slli_epi32(halves, 16)); }
inline __m512i joined(__m512i low, __m512i high) { return _mm512_or_si512(low, _mm512_slli_epi32(high, 16)); }

// One part of an operand, packed. Row r and pair p of A stand at values + r * row_step + p * pair_step.
struct PartsOfA {
    const uint16_t* values;
    int64_t row_step, pair_step;
};

struct Segment {  // one product of a part of A with a part of B, added to the same sums
    PartsOfA a;
    const uint16_t* b;  // [pairs, kColumns, 2]
};

// out (+)= the sum of the segments' products. `rows` and `columns` are those that exist.
void tile(const Segment* segments, int num_segments, int64_t pairs, float* out, int64_t stride, int64_t rows,
          int64_t columns, bool adds) {
    __m512 sums[kRows][kVectors];
    for (auto& row : sums) {
        for (auto& sum : row) sum = _mm512_setzero_ps();
    }
    for (int s = 0; s < num_segments; ++s) {
        const uint16_t* b = segments[s].b;
        const uint16_t* a = segments[s].a.values;
        const int64_t pair_step = segments[s].a.pair_step, row_step = segments[s].a.row_step;
        const uint16_t* starts[kRows];
        for (int64_t r = 0; r < kRows; ++r) starts[r] = a + (r < rows ? r : rows - 1) * row_step;
        for (int64_t p = 0, at = 0; p < pairs; ++p, at += pair_step, b += 2 * kColumns) {
            __m512bh columns_of_b[kVectors];
            for (int64_t v = 0; v < kVectors; ++v) columns_of_b[v] = (__m512bh)_mm512_load_si512(b + 32 * v);
#pragma GCC unroll 8
            for (int64_t r = 0; r < kRows; ++r) {
                int32_t pair;
                std::memcpy(&pair, starts[r] + at, sizeof pair);
                const __m512bh left = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 3
                for (int64_t v = 0; v < kVectors; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], left, columns_of_b[v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int64_t r = 0; r < kRows; ++r) {
        if (r >= rows) break;
#pragma GCC unroll 3
        for (int64_t v = 0; v < kVectors; ++v) {
            const __mmask16 mask = first(columns - 16 * v);
            float* place = out + r * stride + 16 * v;
            const __m512 before = adds ? _mm512_maskz_loadu_ps(mask, place) : _mm512_setzero_ps();
            _mm512_mask_storeu_ps(place, mask, _mm512_add_ps(before, sums[r][v]));
        }
    }
}

inline void transpose(__m512i rows[16]) {
    __m512i other[16];
    for (int i = 0; i < 16; i += 2) {
        other[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        other[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        rows[i] = _mm512_unpacklo_epi64(other[i], other[i + 2]);
        rows[i + 1] = _mm512_unpackhi_epi64(other[i], other[i + 2]);
        rows[i + 2] = _mm512_unpacklo_epi64(other[i + 1], other[i + 3]);
        rows[i + 3] = _mm512_unpackhi_epi64(other[i + 1], other[i + 3]);
    }
    for (int i = 0; i < 16; i += 8) {
        for (int j = 0; j < 4; ++j) {
            other[i + j] = _mm512_shuffle_i32x4(rows[i + j], rows[i + j + 4], 0x88);
            other[i + j + 4] = _mm512_shuffle_i32x4(rows[i + j], rows[i + j + 4], 0xdd);
        }
    }
    for (int j = 0; j < 8; ++j) {
        rows[j] = _mm512_shuffle_i32x4(other[j], other[j + 8], 0x88);
        rows[j + 8] = _mm512_shuffle_i32x4(other[j], other[j + 8], 0xdd);
    }
}

// A row as BF16 in the same order; `low` (or null) takes the rest of each value, `total` (or null) adds the row up.
template <typename T>
void round_row(const T* row, int64_t size, uint16_t* high, uint16_t* low, double* total) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t k = 0; k < size; k += 16) {
        const __m512 values = load(row + k, size - k);
        const __m256i halves = (__m256i)_mm512_cvtneps_pbh(values);
        _mm256_storeu_si256((__m256i*)(high + k), halves);
        if (low != nullptr) {
            const __m512 rest = _mm512_sub_ps(values, widened(_mm512_cvtepu16_epi32(halves)));
            _mm256_storeu_si256((__m256i*)(low + k), (__m256i)_mm512_cvtneps_pbh(rest));
        }
        sum = _mm512_add_ps(sum, values);
    }
    if (total != nullptr) *total += _mm512_reduce_add_ps(sum);
}

// A panel of B whose columns are rows of the source: the sum runs along a row.
template <typename T>
void pack_rows(const T* source, int64_t stride, int64_t columns, int64_t size, uint16_t* high, uint16_t* low) {
    for (int64_t column = 0; column < kColumns; column += 16) {
        for (int64_t k = 0; k < size; k += 32) {
            __m512i tops[16], rests[16];
            for (int64_t j = 0; j < 16; ++j) {
                __m512 one = _mm512_setzero_ps(), two = one;
                if (column + j < columns) {
                    const T* row = source + (column + j) * stride + k;
                    one = load(row, size - k);
                    two = size - k > 16 ? load(row + 16, size - k - 16) : two;
                }
                tops[j] = (__m512i)_mm512_cvtne2ps_pbh(two, one);
                if (low != nullptr) {
                    const __m512 first_half = _mm512_castsi512_ps(
                        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(tops[j])), 16));
                    const __m512 second_half = _mm512_castsi512_ps(
                        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(tops[j], 1)), 16));
                    rests[j] = (__m512i)_mm512_cvtne2ps_pbh(_mm512_sub_ps(two, second_half),
                                                            _mm512_sub_ps(one, first_half));
                }
            }
            const int64_t pairs = size - k >= 32 ? 16 : (size - k + 1) / 2;
            uint16_t* place = high + (k / 2 * kColumns + column) * 2;
            transpose(tops);
            for (int64_t p = 0; p < pairs; ++p) _mm512_store_si512(place + p * 2 * kColumns, tops[p]);
            if (low == nullptr) continue;
            place = low + (k / 2 * kColumns + column) * 2;
            transpose(rests);
            for (int64_t p = 0; p < pairs; ++p) _mm512_store_si512(place + p * 2 * kColumns, rests[p]);
        }
    }
}

// A panel of B whose columns are columns of the source, less `middle` (or null): the sum runs down.
template <typename T>
void pack_columns(const T* source, int64_t stride, int64_t columns, int64_t size, uint16_t* high, const float* middle) {
    for (int64_t v = 0; v < kVectors; ++v) {
        const int64_t count = columns - 16 * v;
        const __m512 less = middle == nullptr ? _mm512_setzero_ps() : load(middle + 16 * v, count);
        for (int64_t k = 0; k < size; k += 2) {
            const T* row = source + k * stride + 16 * v;
            const __m512 one = _mm512_sub_ps(load(row, count), less);
            const __m512 two = k + 1 < size ? _mm512_sub_ps(load(row + stride, count), less) : _mm512_setzero_ps();
            _mm512_store_si512(high + (k / 2 * kColumns + 16 * v) * 2, joined(rounded(one), rounded(two)));
        }
    }
}

// The mean of some rows of a matrix.
template <typename T>
std::vector<float> middle_of(const T* source, int64_t stride, int64_t rows, int64_t width) {
    const int64_t step = up(rows, kSampledRows) / kSampledRows;
    std::vector<float> mean(up(width, 16), 0.0f);
    int64_t count = 0;
    for (int64_t row = 0; row < rows; row += step, ++count) {
        for (int64_t k = 0; k < width; k += 16) {
            const __m512 values = load(source + row * stride + k, width - k);
            _mm512_storeu_ps(mean.data() + k, _mm512_add_ps(_mm512_loadu_ps(mean.data() + k), values));
        }
    }
    for (float& value : mean) value /= (float)count;
    return mean;
}

// -- the three forms ---------------------------------------------------------------------------------------------

template <typename H, typename W>
void make_logits(const ProductJob& job) {
    const int64_t steps = up(job.width, 32), pairs = (job.width + 1) / 2;
    const bool has_low_a = job.hidden.parts > 1, has_low_b = job.weight.parts > 1;
    Scratch high(job.num_rows * steps), low(has_low_a ? job.num_rows * steps : 0);
    const int64_t panels = up(job.num_tokens, kColumns) / kColumns;
#pragma omp parallel num_threads(job.num_threads)
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < job.num_rows; ++row) {
            round_row((const H*)job.hidden.values + row * job.hidden.stride, job.width, high.data() + row * steps,
                      has_low_a ? low.data() + row * steps : nullptr, nullptr);
        }
        Scratch panel(steps * kColumns), rest(has_low_b ? steps * kColumns : 0);
#pragma omp for schedule(static)
        for (int64_t index = 0; index < panels; ++index) {
            const int64_t token = index * kColumns, columns = job.num_tokens - token;
            pack_rows((const W*)job.weight.values + token * job.weight.stride, job.weight.stride, columns, job.width,
                      panel.data(), has_low_b ? rest.data() : nullptr);
            for (int64_t row = 0; row < job.num_rows; row += kRows) {
                const PartsOfA top{high.data() + row * steps, steps, 2}, tail{low.data() + row * steps, steps, 2};
                Segment segments[3];
                int count = 0;
                if (has_low_a) segments[count++] = {tail, panel.data()};
                if (has_low_b) segments[count++] = {top, rest.data()};
                segments[count++] = {top, panel.data()};
                tile(segments, count, pairs, job.logits + row * job.logits_stride + token, job.logits_stride,
                     job.num_rows - row, columns, false);
            }
        }
    }
}

// Threads share the vocabulary, each with sums of its own, which are added up in order.
//
// What all rows of the weight have in common, m, multiplies the sum of a row of gradients, which is 0 or nearly so.
// Rounded, neither is exact, and where logits lie around -100 that is most of the error. So the product is
// gradient (weight - m) + sum(gradient) m, with an m that need not be the exact mean.
template <typename W>
void make_hidden_gradient(const ProductJob& job) {
    const int64_t panels = up(job.width, kColumns) / kColumns, rows = job.num_rows, width = panels * kColumns;
    const W* weight = (const W*)job.weight.values;
    const std::vector<float> middle = middle_of(weight, job.weight.stride, job.num_tokens, job.width);
    std::vector<std::vector<float>> sums(job.num_threads);
    std::vector<std::vector<double>> totals(job.num_threads);
#pragma omp parallel num_threads(job.num_threads)
    {
        const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        const int64_t share = up((job.num_tokens + threads - 1) / threads, 2);
        const int64_t begin = thread * share, end = begin + share < job.num_tokens ? begin + share : job.num_tokens;
        if (begin < end) {
            sums[thread].assign(rows * width, 0.0f);
            totals[thread].assign(rows, 0.0);
            Scratch a(rows * kSumBlock), b(width * kSumBlock);
            for (int64_t token = begin; token < end; token += kSumBlock) {
                const int64_t size = end - token < kSumBlock ? end - token : kSumBlock;
                for (int64_t column = 0; column < width; column += kColumns) {
                    pack_columns(weight + token * job.weight.stride + column, job.weight.stride, job.width - column,
                                 size, b.data() + column * kSumBlock, middle.data() + column);
                }
                for (int64_t row = 0; row < rows; ++row) {
                    round_row(job.logits + row * job.logits_stride + token, size, a.data() + row * kSumBlock, nullptr,
                              &totals[thread][row]);
                }
                for (int64_t column = 0; column < width; column += kColumns) {
                    for (int64_t row = 0; row < rows; row += kRows) {
                        const Segment segment{{a.data() + row * kSumBlock, kSumBlock, 2}, b.data() + column * kSumBlock};
                        tile(&segment, 1, (size + 1) / 2, sums[thread].data() + row * width + column, width, rows - row,
                             kColumns, true);
                    }
                }
            }
        }
#pragma omp barrier
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) {
            double total = 0.0;
            for (const auto& part : totals) total += part.empty() ? 0.0 : part[row];
            for (int64_t k = 0; k < job.width; ++k) {
                float sum = (float)(total * middle[k]);
                for (const auto& part : sums) sum += part.empty() ? 0.0f : part[row * width + k];
                job.out[row * job.out_stride + k] = sum;
            }
        }
    }
}

template <typename H>
void make_weight_gradient(const ProductJob& job) {
    const int64_t panels = up(job.width, kColumns) / kColumns, strips = up(job.num_tokens, kTokenBlock) / kTokenBlock;
    const int64_t block = job.num_rows < kSumBlock ? up(job.num_rows, 2) : kSumBlock;
    Scratch b(panels * block * kColumns);
    for (int64_t start = 0; start < job.num_rows; start += block) {
        const int64_t size = job.num_rows - start < block ? job.num_rows - start : block, pairs = (size + 1) / 2;
        const bool adds = job.adds || start > 0;
#pragma omp parallel num_threads(job.num_threads)
        {
#pragma omp for schedule(static)
            for (int64_t panel = 0; panel < panels; ++panel) {
                pack_columns((const H*)job.hidden.values + start * job.hidden.stride + panel * kColumns,
                             job.hidden.stride, job.width - panel * kColumns, size, b.data() + panel * block * kColumns,
                             nullptr);
            }
            Scratch a(block * kTokenBlock);  // [kTokenBlock / kRows, pairs, kRows, 2]
#pragma omp for schedule(static)
            for (int64_t strip = 0; strip < strips; ++strip) {
                const int64_t token = strip * kTokenBlock;
                const int64_t count = job.num_tokens - token < kTokenBlock ? job.num_tokens - token : kTokenBlock;
                for (int64_t p = 0; p < pairs; ++p) {
                    const float* row = job.logits + (start + 2 * p) * job.logits_stride + token;
                    for (int64_t j = 0; j < count; j += 16) {
                        const __m512 one = load(row + j, count - j);
                        const __m512 two = 2 * p + 1 < size ? load(row + job.logits_stride + j, count - j)
                                                            : _mm512_setzero_ps();
                        const __m512i both = joined(rounded(one), rounded(two));
                        uint16_t* place = a.data() + j * block + p * 2 * kRows;
                        _mm256_storeu_si256((__m256i*)place, _mm512_castsi512_si256(both));
                        _mm256_storeu_si256((__m256i*)(place + kRows * block), _mm512_extracti64x4_epi64(both, 1));
                    }
                }
                for (int64_t panel = 0; panel < panels; ++panel) {
                    for (int64_t row = 0; row < count; row += kRows) {
                        const Segment segment{{a.data() + row * block, 2, 2 * kRows}, b.data() + panel * block * kColumns};
                        tile(&segment, 1, pairs, job.out + (token + row) * job.out_stride + panel * kColumns,
                             job.out_stride, count - row, job.width - panel * kColumns, adds);
                    }
                }
            }
        }
    }
}

#endif

}  // namespace

extern "C" int32_t stillroom_has_bf16_products() { return STILLROOM_HAS_BF16; }

// 0 done | 1 this library has no such products.
extern "C" int32_t stillroom_product([[maybe_unused]] const ProductJob* job) {
#if STILLROOM_HAS_BF16
    if (job->num_rows == 0 || job->num_tokens == 0 || job->width == 0) return 1;
    const bool hidden = job->hidden.is_bf16, weight = job->weight.is_bf16;
    if (job->form == 0) {
        if (hidden) weight ? make_logits<uint16_t, uint16_t>(*job) : make_logits<uint16_t, float>(*job);
        else weight ? make_logits<float, uint16_t>(*job) : make_logits<float, float>(*job);
    } else if (job->form == 1) {
        weight ? make_hidden_gradient<uint16_t>(*job) : make_hidden_gradient<float>(*job);
    } else {
        hidden ? make_weight_gradient<uint16_t>(*job) : make_weight_gradient<float>(*job);
    }
    return 0;
#else
    return 1;
#endif
}
