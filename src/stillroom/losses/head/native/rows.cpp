// The row kernel in C++: logits in, row values and gradients out, one trip through memory for each row.
//
// A row of logits fits the core's own cache, so its few passes are cheap and the chunk is read and written once.
// The formulas are those of divergence.py and sparse.py; the tests hold the two to the same numbers.
//
// Plain loops that the compiler vectorises (`omp simd`), no intrinsics: the same source serves AVX-512, AVX2 and
// NEON.
//
// Legend: z logits, V columns, K kept ids, T temperature, q student, p teacher.

#include "loops.h"

#include <type_traits>
#include <vector>

namespace {

using namespace stillroom;

constexpr float kLeast = -1e30f;  // numerics.LOG_ZERO

// Mirrored field by field in kernel_compiled.py.
struct Job {
    int64_t num_rows, num_columns, num_threads;
    Head student, teacher;
    const int64_t* ids;   // [rows, K], top-k and sampled
    const float* values;  // [rows, K]: log-probs, or weights
    const float* side;    // [rows]: tail log mass, or entropy
    int64_t num_kept;
    const int64_t* targets;
    const float *temperatures, *kd_weights, *ce_weights;
    float *kd, *ce;
    uint8_t* is_bad;
    int32_t kind;         // 0 no teacher, 1 dense, 2 top-k, 3 sampled
    int32_t divergence;
    Place place;
    int32_t has_ce, wants_gradient;
};

// A row's softmax as numbers up to a factor: exps[j] * scale, or exps[j]^2 * scale.
struct Softmax {
    float* exps = nullptr;
    float scale = 0.0f;
    double log_norm = 0.0;  // of all outcomes, relative to the row's top
    bool is_squared = false;
};

// d value / d (z / T) = slope_scale * slope[j] + exps_scale * tempered.exps[j]
struct Pull {
    const float* slope = nullptr;
    float slope_scale = 0.0f, exps_scale = 0.0f;
};

// -- one row after the other -------------------------------------------------------------------------------------

// A thread's worker: its buffers are as long as a vocabulary and stay in the core's cache from row to row.
class Worker {
  public:
    explicit Worker(const Job& job)
        : job_(job), size_(job.num_columns), tempered_exps_(size_), plain_exps_(size_),
          slope_(job.kind == 1 ? size_ : 0), cap_slope_(job.student.softcap > 0.0f ? size_ : 0),
          kept_logits_(job.num_kept), kept_slope_(job.num_kept + 1) {}

    // False where the target is not in the vocabulary.
    bool run(int64_t row) {
        row_ = row;
        z_ = job_.student.raw + row * job_.student.stride;
        target_ = job_.targets[row];
        temperature_ = job_.temperatures[row];
        inverse_ = 1.0f / temperature_;
        tempered_ = Softmax{};
        pull_ = Pull{};
        if (target_ < 0 || target_ >= size_) return false;
        finish(job_.student, z_, size_, cap_slope_.empty() ? nullptr : cap_slope_.data());
        double value = 0.0;
        const bool is_taught = job_.kind != 0 && distil(value);
        const bool is_bad = job_.kind != 0 && !is_taught;
        const float kd_weight = is_taught ? job_.kd_weights[row] : 0.0f;
        const float ce_weight = job_.ce_weights[row] + (is_bad ? job_.kd_weights[row] : 0.0f);
        job_.is_bad[row] = is_bad;
        job_.kd[row] = is_taught ? (float)(value * temperature_ * temperature_) : 0.0f;
        const bool has_labels = job_.has_ce || is_bad;
        cross_entropy();  // also where it has no weight: the guard looks at it; at T = 1 and 2 its norm is there already
        if (job_.wants_gradient) leave_gradient(kd_weight * temperature_, has_labels ? ce_weight : 0.0f, is_taught);
        return true;
    }

  private:
    bool distil(double& value) {
        switch (job_.divergence) {
            case 0: return distil_with<ForwardKL>(value);
            case 1: return distil_with<ReverseKL>(value);
            case 2: return distil_with<JensenShannonLow>(value);
            case 3: return distil_with<JensenShannonHigh>(value);
            case 4: return distil_with<SkewForwardKL>(value);
            case 5: return distil_with<SkewReverseKL>(value);
            case 6: return distil_with<SteepSkewReverseKL>(value);
            default: return distil_with<TotalVariation>(value);
        }
    }

    template <typename D>
    bool distil_with(double& value) {
        if (job_.kind == 2) return top_k<D>(value);
        top_ = maximum(z_, size_);
        const Sums sums = exponentials(z_, top_, inverse_, tempered_exps_.data(), size_);
        set_softmax(0.0, 0.0, 1.0, sums);
        return job_.kind == 1 ? dense<D>(value) : sampled(value);
    }

    // From the kept outcomes' share of each norm, and the sums of the others around a top `shift` below the row's own.
    void set_softmax(double head, double plain_head, double shift, const Sums& sums) {
        float* exps = tempered_exps_.data();
        const double norm = head + shift * sums.exps, plain_norm = plain_head + shift * shift * sums.squares;
        tempered_ = {exps, (float)(shift / norm), std::log(norm), false};
        // At T = 1 the row's softmax is the tempered one, at T = 2 its square.
        plain_ = temperature_ == 2.0f ? Softmax{exps, (float)(shift * shift / plain_norm), std::log(plain_norm), true}
                                      : tempered_;
    }

    template <typename D>
    bool dense(double& value) {
        float* t = job_.teacher.raw + row_ * job_.teacher.stride;
        finish(job_.teacher, t, size_, nullptr);
        const float top = maximum(t, size_);
        if constexpr (std::is_same_v<D, ForwardKL>) return forward_kl(t, top, value);
        const double norm = exponentials(t, top, inverse_, slope_.data(), size_).exps;
        if (!std::isfinite(norm)) return false;
        const float p_scale = (float)(1.0 / norm), p_log_norm = (float)std::log(norm);
        const Place place = job_.place;
        const float q_scale = tempered_.scale, q_log_norm = (float)tempered_.log_norm, q_top = top_, inverse = inverse_;
        const float *z = z_, *exps = tempered_.exps;
        float* slope = slope_.data();
        double slopes = 0.0;
        for (int64_t start = 0; start < size_; start += kBlock) {
            const int64_t stop = start + kBlock < size_ ? start + kBlock : size_;
            float block_value = 0.0f, block_slope = 0.0f;
#pragma omp simd reduction(+ : block_value, block_slope)
            for (int64_t j = start; j < stop; ++j) {
                float v, g;
                D::at(exps[j] * q_scale, (z[j] - q_top) * inverse - q_log_norm, slope[j] * p_scale,
                      (t[j] - top) * inverse - p_log_norm, place, v, g);
                slope[j] = g;
                block_value += v;
                block_slope += g;
            }
            value += block_value;
            slopes += block_slope;
        }
        pull_ = {slope, 1.0f, (float)-slopes * q_scale};
        return true;
    }

    // Needs no pass of its own: sum p (log p - log q) = sum e_p (x_p - x_q) / Z_p - log Z_p + log Z_q.
    bool forward_kl(const float* t, float top, double& value) {
        const float q_top = top_, inverse = inverse_;
        const float* z = z_;
        float* exps = slope_.data();
        double norm = 0.0, cross = 0.0;
        for (int64_t start = 0; start < size_; start += kBlock) {
            const int64_t stop = start + kBlock < size_ ? start + kBlock : size_;
            float sum = 0.0f, block_cross = 0.0f;
#pragma omp simd reduction(+ : sum, block_cross)
            for (int64_t j = start; j < stop; ++j) {
                const float x = (z[j] - q_top) * inverse, y = (t[j] - top) * inverse;
                const float e = exp_below_zero(y);
                exps[j] = e;
                sum += e;
                block_cross += e * ((y < kLeast ? kLeast : y) - (x < kLeast ? kLeast : x));
            }
            norm += sum;
            cross += block_cross;
        }
        if (!std::isfinite(norm)) return false;
        value = cross / norm - std::log(norm) + tempered_.log_norm;
        pull_ = {exps, (float)(-1.0 / norm), tempered_.scale};
        return true;
    }

    // The kept outcomes and one bucket for all others, summed around their own maximum so that no tail is too small.
    template <typename D>
    bool top_k(double& value) {
        const int64_t count = job_.num_kept;
        const int64_t* ids = job_.ids + row_ * count;
        const float* log_p = job_.values + row_ * count;
        const float tail_log_p = job_.side[row_];
        double mass = std::exp((double)tail_log_p);
        for (int64_t k = 0; k < count; ++k) mass += std::exp((double)log_p[k]);
        if (!std::isfinite(mass) || mass == 0.0) return false;
        top_ = -kInfinity;
        for (int64_t k = 0; k < count; ++k) {
            kept_logits_[k] = z_[ids[k]];
            top_ = kept_logits_[k] > top_ ? kept_logits_[k] : top_;
        }
        for (int64_t k = 0; k < count; ++k) z_[ids[k]] = -kInfinity;
        const float tail_top = maximum(z_, size_);
        top_ = tail_top > top_ ? tail_top : top_;
        const bool has_tail = tail_top > -kInfinity;
        // Without a tail every exponential is exp(-inf - 0) = 0.
        const Sums sums = exponentials(z_, has_tail ? tail_top : 0.0f, inverse_, tempered_exps_.data(), size_);
        double head = 0.0, plain_head = 0.0;
        for (int64_t k = 0; k < count; ++k) {
            z_[ids[k]] = kept_logits_[k];
            head += std::exp((double)(kept_logits_[k] - top_) * inverse_);
            plain_head += std::exp((double)(kept_logits_[k] - top_));
        }
        const double tail = sums.exps, shift = has_tail ? std::exp((double)(tail_top - top_) * inverse_) : 0.0;
        set_softmax(head, plain_head, shift, sums);
        const double log_norm = tempered_.log_norm;
        const double tail_log_q = has_tail ? (double)(tail_top - top_) * inverse_ + std::log(tail) - log_norm : -kInfinity;
        double slopes = 0.0;
        for (int64_t k = 0; k <= count; ++k) {
            double log_q = k < count ? (double)(kept_logits_[k] - top_) * inverse_ - log_norm : tail_log_q;
            log_q = log_q < kLeast ? (double)kLeast : log_q;
            const float lp = k < count ? log_p[k] : tail_log_p;
            float v, g;
            D::at((float)std::exp(log_q), (float)log_q, std::exp(lp), lp, job_.place, v, g);
            value += v;
            slopes += g;
            kept_slope_[k] = g;
        }
        for (int64_t k = 0; k < count; ++k) {
            kept_slope_[k] -= (float)(slopes * std::exp((double)(kept_logits_[k] - top_) * inverse_ - log_norm));
        }
        kept_slope_[count] -= (float)(slopes * std::exp(tail_log_q));
        pull_ = {nullptr, 0.0f, tail > 0.0 ? (float)(kept_slope_[count] / tail) : 0.0f};
        return true;
    }

    bool sampled(double& value) {
        const int64_t *ids = job_.ids + row_ * job_.num_kept;
        const float *weights = job_.values + row_ * job_.num_kept, entropy = job_.side[row_];
        double mass = 0.0;
        for (int64_t k = 0; k < job_.num_kept; ++k) mass += weights[k];
        if (!std::isfinite(mass + entropy)) return false;
        value = -entropy;
        for (int64_t k = 0; k < job_.num_kept; ++k) {
            if (weights[k] == 0.0f) continue;  // padding
            value -= weights[k] * ((double)(z_[ids[k]] - top_) * inverse_ - tempered_.log_norm);
        }
        pull_ = {nullptr, 0.0f, (float)(mass * tempered_.scale)};
        return true;
    }

    void cross_entropy() {
        if (tempered_.exps == nullptr || (temperature_ != 1.0f && temperature_ != 2.0f)) {
            if (tempered_.exps == nullptr) top_ = maximum(z_, size_);
            const double norm = exponentials(z_, top_, 1.0f, plain_exps_.data(), size_).exps;
            plain_ = {plain_exps_.data(), (float)(1.0 / norm), std::log(norm), false};
        }
        job_.ce[row_] = (float)(plain_.log_norm + ((double)top_ - z_[target_]));
    }

    // z <- d loss / d bare product.
    void leave_gradient(float kd_weight, float ce_weight, bool is_taught) {
        const float from_plain = ce_weight != 0.0f ? ce_weight * plain_.scale : 0.0f;
        if (is_taught) {
            combine(kd_weight * pull_.slope_scale, kd_weight * pull_.exps_scale, from_plain);
        } else if (from_plain == 0.0f) {
            std::memset(z_, 0, size_ * sizeof(float));
        } else {
            only_plain(from_plain);
        }
        z_[target_] -= ce_weight;
        if (is_taught && job_.kind == 2) place_kept(kd_weight, ce_weight);
        if (is_taught && job_.kind == 3) place_samples(kd_weight);
        float* z = z_;
        if (!cap_slope_.empty()) {
            const float* slope = cap_slope_.data();
#pragma omp simd
            for (int64_t j = 0; j < size_; ++j) z[j] *= slope[j];
        } else if (job_.student.scale != 1.0f) {
            const float scale = job_.student.scale;
#pragma omp simd
            for (int64_t j = 0; j < size_; ++j) z[j] *= scale;
        }
    }

    void only_plain(float factor) {
        float* z = z_;
        const float* exps = plain_.exps;
        if (plain_.is_squared) {
#pragma omp simd
            for (int64_t j = 0; j < size_; ++j) z[j] = factor * exps[j] * exps[j];
        } else {
#pragma omp simd
            for (int64_t j = 0; j < size_; ++j) z[j] = factor * exps[j];
        }
    }

    void combine(float from_slope, float from_tempered, float from_plain) {
        const bool has_slope = pull_.slope != nullptr;
        if (from_plain == 0.0f || (plain_.exps == tempered_.exps && !plain_.is_squared)) {
            from_tempered += from_plain;
            has_slope ? combine_as<true, kNone>(from_slope, from_tempered, 0.0f)
                      : combine_as<false, kNone>(from_slope, from_tempered, 0.0f);
        } else if (plain_.is_squared) {
            has_slope ? combine_as<true, kSquared>(from_slope, from_tempered, from_plain)
                      : combine_as<false, kSquared>(from_slope, from_tempered, from_plain);
        } else {
            has_slope ? combine_as<true, kOwn>(from_slope, from_tempered, from_plain)
                      : combine_as<false, kOwn>(from_slope, from_tempered, from_plain);
        }
    }

    enum Plain { kNone, kSquared, kOwn };

    template <bool has_slope, Plain plain_kind>
    void combine_as(float from_slope, float from_tempered, float from_plain) {
        float* z = z_;
        const float *slope = pull_.slope, *tempered = tempered_.exps, *plain = plain_.exps;
#pragma omp simd
        for (int64_t j = 0; j < size_; ++j) {
            float gradient = from_tempered * tempered[j];
            if constexpr (has_slope) gradient += from_slope * slope[j];
            if constexpr (plain_kind == kSquared) gradient += from_plain * tempered[j] * tempered[j];
            if constexpr (plain_kind == kOwn) gradient += from_plain * plain[j];
            z[j] = gradient;
        }
    }

    void place_kept(float kd_weight, float ce_weight) {
        const int64_t* ids = job_.ids + row_ * job_.num_kept;
        for (int64_t k = 0; k < job_.num_kept; ++k) {
            double gradient = kd_weight * kept_slope_[k];
            if (ce_weight != 0.0f) {
                gradient += ce_weight * std::exp((double)(kept_logits_[k] - top_) - plain_.log_norm);
                if (ids[k] == target_) gradient -= ce_weight;
            }
            z_[ids[k]] = (float)gradient;
        }
    }

    void place_samples(float kd_weight) {
        const int64_t* ids = job_.ids + row_ * job_.num_kept;
        const float* weights = job_.values + row_ * job_.num_kept;
        for (int64_t k = 0; k < job_.num_kept; ++k) z_[ids[k]] -= kd_weight * weights[k];
    }

    const Job& job_;
    const int64_t size_;
    std::vector<float> tempered_exps_, plain_exps_, slope_, cap_slope_, kept_logits_, kept_slope_;
    int64_t row_ = 0, target_ = 0;
    float* z_ = nullptr;
    float temperature_ = 1.0f, inverse_ = 1.0f, top_ = 0.0f;
    Softmax tempered_, plain_;
    Pull pull_;
};

}  // namespace

// 0 done | 1 a target or an id lies outside the vocabulary. Ids are checked before anything is written.
extern "C" int32_t stillroom_rows(const Job* job) {
    const int64_t num_ids = job->kind >= 2 ? job->num_rows * job->num_kept : 0;
    for (int64_t k = 0; k < num_ids; ++k) {
        if (job->ids[k] < 0 || job->ids[k] >= job->num_columns) return 1;
    }
    int32_t status = 0;
#pragma omp parallel num_threads(job->num_threads) reduction(max : status)
    {
        Worker worker(*job);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < job->num_rows; ++row) {
            if (!worker.run(row)) status = 1;
        }
    }
    return status;
}
