// What sampling asks of one row of logits. Included by kernels_impl.h, in its anonymous namespace.

inline F load_tail(const float* x, int n) {  // the rest is -inf
    float lanes[LANES];
    for (int i = 0; i < LANES; i++) lanes[i] = i < n ? x[i] : -__builtin_inff();
    return load(lanes);
}

inline float largest(const float* x, int n) {
    F most[4];
    for (F& one : most) one = set1(-__builtin_inff());
    int i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) most[j] = max(load(x + i + j * LANES), most[j]);
    for (; i + LANES <= n; i += LANES) most[0] = max(load(x + i), most[0]);
    if (i < n) most[1] = max(load_tail(x + i, n - i), most[1]);
    return reduce_max(max(max(most[0], most[1]), max(most[2], most[3])));
}

void admit(const float* x, const std::uint32_t* mask, int n, float* out) {
    const std::uint32_t all = 0xFFFFFFFFu;
    for (int start = 0; start < n; start += 32) {
        const std::uint32_t bits = mask[start / 32];
        const int count = n - start < 32 ? n - start : 32;
        if (bits == all) {
            __builtin_memcpy(out + start, x + start, sizeof(float) * (std::size_t)count);
        } else {
            for (int i = 0; i < count; i++) out[start + i] = bits >> i & 1 ? x[start + i] : -__builtin_inff();
        }
    }
}

// Block by block, so that the place of the best is looked for in one of them only.
int argmax(const float* x, int n, float* value) {
    constexpr int BLOCK = 1024;
    int best = 0;
    *value = -__builtin_inff();
    for (int start = 0; start < n; start += BLOCK) {
        const int count = n - start < BLOCK ? n - start : BLOCK;
        bool nan = false;
        int i = 0;
        for (; i + LANES <= count; i += LANES) nan |= any_nan(load(x + start + i));
        if (i < count) nan |= any_nan(load_tail(x + start + i, count - i));
        const float m = largest(x + start, count);
        if (nan) {
            *value = __builtin_nanf("");
            for (i = start; x[i] == x[i];) i++;
            return i;
        }
        if (m > *value) *value = m, best = start;
    }
    while (x[best] != *value) best++;
    return best;
}

float logsumexp(const float* x, int n) {
    const float m = largest(x, n);
    if (m == -__builtin_inff() || m == __builtin_inff()) return m;
    double total = 0.0;
    const F shift = set1(m);
    int i = 0;
    while (i + LANES <= n) {
        F part = zero();
        for (int j = 0; j < 64 && i + LANES <= n; j++, i += LANES) part = add(part, exponential(sub(load(x + i), shift)));
        total += (double)reduce_add(part);
    }
    if (i < n) total += (double)reduce_add(exponential(sub(load_tail(x + i, n - i), shift)));
    return (float)((double)m + __builtin_log(total));
}

void top_k(const float* x, int n, int k, float* values, std::int32_t* ids) {
    int found = 0;
    float least = -__builtin_inff();
    const auto take = [&](int at) {
        const float v = x[at];
        if (!(found < k ? v == v : v > least)) return;
        int place = found < k ? found++ : k - 1;
        while (place > 0 && values[place - 1] < v) {
            values[place] = values[place - 1];
            ids[place] = ids[place - 1];
            place--;
        }
        values[place] = v;
        ids[place] = at;
        if (found == k) least = values[k - 1];
    };
    int i = 0;
    for (; i < n && found < k; i++) take(i);
    for (; i + LANES <= n; i += LANES) {
        if (!any_greater(load(x + i), set1(least))) continue;
        for (int j = 0; j < LANES; j++) take(i + j);
    }
    for (; i < n; i++) take(i);
    for (; found < k; found++) {  // only where x holds NaN
        values[found] = -__builtin_inff();
        ids[found] = 0;
    }
}

constexpr int WEIGHT_BLOCK = 256;

// exp(x - m) of up to WEIGHT_BLOCK ids; zero beyond n.
inline void weights_of(const float* x, int n, float m, float* weights) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) store(weights + i, exponential(sub(load(x + i), set1(m))));
    if (i < n) {
        store(weights + i, exponential(sub(load_tail(x + i, n - i), set1(m))));
        i += LANES;
    }
    for (; i < WEIGHT_BLOCK; i += LANES) store(weights + i, zero());
}

// A radix selection over the bits of the weights, which as positive floats are ordered like integers: 12 bits, 12 bits, 6 bits.
float nucleus(const float* x, int n, float mass) {
    const float m = largest(x, n);
    double sums[4096], goal = 0.0, better = 0.0;
    std::uint32_t prefix = 0;
    constexpr int SHIFTS[] = {18, 6, 0}, BITS[] = {12, 12, 6};
    float weights[WEIGHT_BLOCK];
    for (int level = 0; level < 3; level++) {
        const int shift = SHIFTS[level], size = 1 << BITS[level];
        for (int b = 0; b < size; b++) sums[b] = 0.0;
        for (int start = 0; start < n; start += WEIGHT_BLOCK) {
            const int count = n - start < WEIGHT_BLOCK ? n - start : WEIGHT_BLOCK;
            weights_of(x + start, count, m, weights);
            for (int i = 0; i < count; i++) {
                std::uint32_t bits;
                __builtin_memcpy(&bits, weights + i, 4);
                if (level == 0 || bits >> (shift + BITS[level]) == prefix) sums[(bits >> shift) & (size - 1)] += (double)weights[i];
            }
        }
        if (level == 0) {
            double total = 0.0;
            for (int b = size - 1; b >= 0; b--) total += sums[b];
            goal = total * (double)mass;
        }
        int b = size - 1;
        // The last bucket that holds anything is taken if rounding keeps the goal out of reach.
        int last = -1;
        for (; b >= 0; b--) {
            if (sums[b] == 0.0) continue;
            last = b;
            if (better + sums[b] >= goal) break;
            better += sums[b];
        }
        if (b < 0) {
            b = last < 0 ? 0 : last;
            better -= sums[b];
        }
        prefix = (prefix << BITS[level]) | (std::uint32_t)b;
    }
    float least, smallest = m;
    __builtin_memcpy(&least, &prefix, 4);
    for (int start = 0; start < n; start += WEIGHT_BLOCK) {
        const int count = n - start < WEIGHT_BLOCK ? n - start : WEIGHT_BLOCK;
        weights_of(x + start, count, m, weights);
        for (int i = 0; i < count; i++)
            if (weights[i] >= least && x[start + i] < smallest) smallest = x[start + i];
    }
    return smallest;
}

int draw(const float* x, int n, double uniform) {
    const float m = largest(x, n);
    float weights[WEIGHT_BLOCK];
    const auto block_sum = [&](int start) {
        weights_of(x + start, n - start < WEIGHT_BLOCK ? n - start : WEIGHT_BLOCK, m, weights);
        F sum = zero();
        for (int i = 0; i < WEIGHT_BLOCK; i += LANES) sum = add(sum, load(weights + i));
        return (double)reduce_add(sum);
    };
    double total = 0.0, before = 0.0;
    for (int start = 0; start < n; start += WEIGHT_BLOCK) total += block_sum(start);
    const double point = uniform * total;
    int last = 0;
    for (int start = 0; start < n; start += WEIGHT_BLOCK) {
        const double sum = block_sum(start);
        if (sum == 0.0) continue;
        const bool here = before + sum > point;
        double within = before;
        for (int i = 0; i < WEIGHT_BLOCK && start + i < n; i++) {
            if (weights[i] == 0.0f) continue;
            last = start + i;
            within += (double)weights[i];
            if (here && within > point) return last;
        }
        if (here) return last;  // the block's sum was rounded up, its last id is meant
        before += sum;
    }
    return last;
}
