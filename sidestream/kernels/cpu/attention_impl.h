// Attention of some queries over one part of the keys. Included by kernels_impl.h, in its anonymous namespace.

inline std::ptrdiff_t element_of(const KVView& kv, int position) {
    const int page = kv.pages[position >> kv.page_shift];
    return (((std::ptrdiff_t)page << kv.page_shift) + (position & ((1 << kv.page_shift) - 1))) * kv.stride;
}

// Where up to 16 positions from a multiple of 16 are. Returns how many of `count` that is.
inline int elements_of(const KVView& kv, int position, int count, std::ptrdiff_t* at) {
    if (count > 16) count = 16;
    if (count <= 0) return 0;
    if (kv.page_shift >= 4) {  // in one page
        at[0] = element_of(kv, position);
        for (int i = 1; i < count; i++) at[i] = at[i - 1] + kv.stride;
    } else {
        for (int i = 0; i < count; i++) at[i] = element_of(kv, position + i);
    }
    return count;
}

// Keys base + [begin, end) -> a panel for every 32 keys, as weights [32 keys, padded_dim]; dims beyond the head, and keys up to whole panels, are zero.
inline void pack_keys(const KVView& kv, int base, int begin, int end, int head_dim, int padded_dim, bf16* out) {
    alignas(64) static const std::uint32_t zeros[16] = {};
    const int words = head_dim / 2, full = (int)round_up((std::size_t)end, PANEL);
    for (int t = begin; t < full; t += 16) {
        std::ptrdiff_t at[16];
        const int count = elements_of(kv, base + t, end - t, at);
        const std::uint32_t* rows[16];
        for (int i = 0; i < 16; i++) rows[i] = i < count ? (const std::uint32_t*)(kv.keys + at[i]) : nullptr;
        for (int i = 0; i < count; i++)
            for (int d = 0; d < head_dim; d += 32) prefetch(kv.values + at[i] + d);  // a line holds 32 of them
        if (t + 16 < end) {
            const int next = elements_of(kv, base + t + 16, end - t - 16, at);
            for (int i = 0; i < next; i++)
                for (int d = 0; d < head_dim; d += 32) prefetch(kv.keys + at[i] + d);
        }
        std::uint32_t* to = (std::uint32_t*)(out + (std::ptrdiff_t)(t / PANEL) * (padded_dim * PANEL) + t % PANEL * GROUP);
        for (int c = 0; c < padded_dim / 2; c += 16, to += GROUP * PANEL / 2) {
            if (c + 16 <= words) {
                const std::uint32_t* from[16];
                for (int i = 0; i < 16; i++) from[i] = rows[i] ? rows[i] + c : zeros;
                transpose16(from, to, 16);
            } else {
                for (int j = 0; j < 16; j++)
                    for (int i = 0; i < 16; i++) to[j * 16 + i] = rows[i] && c + j < words ? rows[i][c + j] : 0;
            }
        }
    }
}

// Values base + [begin, end) -> a panel for every 32 dims, as weights [32 dims, SPLIT keys]; what is beyond is zero as above.
inline void pack_values(const KVView& kv, int base, int begin, int end, int head_dim, int padded_dim, bf16* out) {
    static const bf16 zeros[INTERLEAVE] = {};
    const int full = (int)round_up((std::size_t)end, PANEL);
    std::ptrdiff_t at[16];
    int count = 0;
    for (int t = begin / PANEL * PANEL; t < full; t += 2) {
        const int i = t % 16;
        if (i == 0) count = t < end ? elements_of(kv, base + t, end - t, at) : 0;
        const bf16* a = t >= begin && i < count ? kv.values + at[i] : nullptr;
        const bf16* b = t + 1 >= begin && i + 1 < count ? kv.values + at[i + 1] : nullptr;
        for (int d = 0; d < padded_dim; d += INTERLEAVE) {
            bf16* to = out + (std::ptrdiff_t)(d / PANEL) * (SPLIT * PANEL) + t / GROUP * (GROUP * PANEL) + d % PANEL / 16 * (GROUP * 16) + t % GROUP / 2 * 32 + d % 16 * 2;
            if (d + INTERLEAVE <= head_dim) {
                interleave(a ? a + d : zeros, b ? b + d : zeros, to);
            } else {
                for (int i = 0; i < INTERLEAVE; i++) {
                    to[2 * i] = a && d + i < head_dim ? a[d + i] : (bf16)0;
                    to[2 * i + 1] = b && d + i < head_dim ? b[d + i] : (bf16)0;
                }
            }
        }
    }
}

inline bool any_nan(const float* x, int n) {
    int found = 0;
    for (int i = 0; i < n; i++) found |= x[i] != x[i];
    return found != 0;
}

void attend(const AttendJob& job) {
    Tiles tiles(nullptr);
    const int base = job.split * SPLIT, dim = job.head_dim, padded = job.padded_dim;
    int low = SPLIT, high = -1;
    for (int i = 0; i < job.queries; i++) {
        const int a = job.first[i] - base, b = job.last[i] - base;
        if (a < low) low = a;
        if (b > high) high = b;
    }
    const int begin = low < 0 ? 0 : low;
    low = begin / PANEL * PANEL;
    const int end = high + 1 < SPLIT ? high + 1 : SPLIT;
    if (end <= low) {
        for (int i = 0; i < job.queries; i++) job.max[i] = -__builtin_inff(), job.sum[i] = 0.0f;
        return;
    }
    bf16* keys = (bf16*)job.scratch;
    bf16* values = keys + (std::ptrdiff_t)SPLIT * padded;
    float* scores = (float*)(values + (std::ptrdiff_t)SPLIT * padded);
    bf16* weights = (bf16*)(scores + (std::ptrdiff_t)MAX_QUERIES * SPLIT);
    pack_keys(job.kv, base, low, end, dim, padded, keys);
    pack_values(job.kv, base, begin, end, dim, padded, values);
    const int full = (int)round_up((std::size_t)end, PANEL);
    for (int t = low; t < full; t += PANEL)
        tiles.plain(job.queries, 1, {job.q, nullptr, padded}, padded, keys + (std::ptrdiff_t)(t / PANEL) * (padded * PANEL), 0, scores + t, SPLIT);
    for (int i = 0; i < job.queries; i++) {
        const int a = job.first[i] - base, b = job.last[i] - base;
        const F first = set1((float)a), last = set1((float)b), nothing = set1(-__builtin_inff());
        float* row = scores + (std::ptrdiff_t)i * SPLIT;
        bf16* probabilities = weights + (std::ptrdiff_t)i * SPLIT;
        F most = nothing;
        for (int t = low; t < full; t += LANES) {
            F s = load(row + t);
            if (t < a || t + LANES - 1 > b) {
                s = inside(iota((float)t), first, last, s, nothing);
                store(row + t, s);
            }
            most = max(s, most);
        }
        const float m = reduce_max(most);
        job.max[i] = m * job.scale;
        if (m == -__builtin_inff()) {  // sees nothing of this split, or nothing but NaN
            for (int t = low; t < full; t++) probabilities[t] = 0;
            job.sum[i] = 0.0f;
            if (any_nan(row + low, full - low)) job.max[i] = job.sum[i] = __builtin_nanf("");
            continue;
        }
        const F scale = set1(job.scale * 1.44269504088896341f), shift = set1(m);
        F total = zero();
        for (int t = low; t < full; t += LANES) {
            store_bf16(probabilities + t, coarse_power(mul(sub(load(row + t), shift), scale)));
            total = add(total, load_bf16(probabilities + t));  // of what multiplies the values, so that the weights sum to one
        }
        job.sum[i] = reduce_add(total);
    }
    for (int d = 0; d < padded; d += PANEL)
        tiles.plain(job.queries, 1, {weights + low, nullptr, SPLIT}, full - low, values + (std::ptrdiff_t)d * SPLIT + low * PANEL, 0, job.out + d, padded);
    // 0 * NaN is NaN: a value that is not finite spoils the queries that do not see it. Each is then computed by itself.
    if (job.queries > 1 && any_nan(job.out, job.queries * padded))
        for (int i = 0; i < job.queries; i++) {
            AttendJob one = job;
            one.queries = 1;
            one.q += (std::ptrdiff_t)i * padded;
            one.first += i;
            one.last += i;
            one.max += i;
            one.sum += i;
            one.out += (std::ptrdiff_t)i * padded;
            attend(one);
        }
}

void merge(float part_max, float part_sum, const float* part, int padded_dim, float* max_, float* sum, float* out) {
    if (part_max == -__builtin_inff()) return;
    const float m = *max_ > part_max ? *max_ : part_max;
    float factors[LANES] = {};
    factors[0] = *max_ - m;
    factors[1] = part_max - m;
    store(factors, exponential(load(factors)));
    const F old = set1(factors[0]), fresh = set1(factors[1]);
    for (int d = 0; d < padded_dim; d += LANES) store(out + d, fma(load(part + d), fresh, mul(load(out + d), old)));
    *sum = part_sum * factors[1] + *sum * factors[0];
    *max_ = m;
}

void finish(const float* acc, float sum, int head_dim, bf16* out) {
    float row[1024];
    for (int k = 0; k < head_dim; k++) row[k] = acc[k] / sum;
    to_bf16(row, head_dim, out);
}

