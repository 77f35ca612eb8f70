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

// Some of what is upcoming. It is called for each 16 keys and each 16 values of every head.
inline void fetch(Upcoming* upcoming) {
    if (!upcoming) return;
    const KVView& kv = upcoming->kv;
    for (int i = 0; i < upcoming->each && upcoming->position < upcoming->end; i++) {
        const std::ptrdiff_t at = element_of(kv, upcoming->position++);
        for (int d = 0; d < kv.ahead; d += 32) prefetch_far(kv.keys + at + d);
        for (int d = 0; d < kv.ahead; d += 32) prefetch_far(kv.values + at + d);
    }
}

// A head's own lines into the nearest cache, those of the heads behind it no nearer than the second. A line holds 32 elements.
inline void fetch_position(const bf16* at, int head_dim, int ahead) {
    int d = 0;
    for (; d < head_dim; d += 32) prefetch(at + d);
    for (; d < ahead; d += 32) prefetch_far(at + d);
}

// Keys base + [begin, end) -> a panel for every 32 keys, as weights [32 keys, padded_dim]; dims beyond the head, and keys up to whole panels, are zero.
inline void pack_keys(const KVView& kv, int base, int begin, int end, int head_dim, int padded_dim, bf16* out, Upcoming* upcoming) {
    alignas(64) static const std::uint32_t zeros[16] = {};
    const int words = head_dim / 2, full = (int)round_up((std::size_t)end, PANEL);
    for (int t = begin; t < full; t += 16) {
        fetch(upcoming);
        std::ptrdiff_t at[16];
        const int count = elements_of(kv, base + t, end - t, at);
        const std::uint32_t* rows[16];
        for (int i = 0; i < 16; i++) rows[i] = i < count ? (const std::uint32_t*)(kv.keys + at[i]) : nullptr;
        for (int i = 0; i < count; i++) fetch_position(kv.values + at[i], head_dim, kv.ahead);
        if (t + 16 < end) {
            const int next = elements_of(kv, base + t + 16, end - t - 16, at);
            for (int i = 0; i < next; i++) fetch_position(kv.keys + at[i], head_dim, kv.ahead);
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
inline void pack_values(const KVView& kv, int base, int begin, int end, int head_dim, int padded_dim, bf16* out, Upcoming* upcoming) {
    static const bf16 zeros[INTERLEAVE] = {};
    const int full = (int)round_up((std::size_t)end, PANEL);
    std::ptrdiff_t at[16];
    int count = 0;
    for (int t = begin / PANEL * PANEL; t < full; t += 2) {
        const int i = t % 16;
        if (i == 0) {
            fetch(upcoming);
            count = t < end ? elements_of(kv, base + t, end - t, at) : 0;
        }
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

// The keys that a query sees of a split, counted from its start: [begin, end), none where end <= begin.
struct Seen {
    int begin, end;
};

inline Seen seen_of(const AttendJob& job, int query) {
    const int first = job.first[query] - job.split * SPLIT, last = job.last[query] - job.split * SPLIT;
    return {first < 0 ? 0 : first, last < SPLIT ? last + 1 : SPLIT};
}

// One row of scores of the keys [low, full) -> probabilities, which are not yet divided by their sum.
inline void soften(const AttendJob& job, int query, int low, int full, float* row, bf16* probabilities) {
    const Seen seen = seen_of(job, query);
    const F nothing = set1(-__builtin_inff());
    F most = nothing, second = nothing;
    for (int t = low; t < full; t += PANEL) {
        if (t < seen.begin || t + PANEL > seen.end) {
            const F first = set1((float)seen.begin), last = set1((float)(seen.end - 1));
            for (int v = 0; v < PANEL; v += LANES) store(row + t + v, inside(iota((float)(t + v)), first, last, load(row + t + v), nothing));
        }
#pragma GCC unroll 4
        for (int v = 0; v < PANEL; v += 2 * LANES) {
            most = max(load(row + t + v), most);
            second = max(load(row + t + v + LANES), second);
        }
    }
    const float m = reduce_max(max(most, second));
    job.max[query] = m * job.scale;
    if (m == -__builtin_inff()) {  // sees nothing of this split, or nothing but NaN
        for (int t = low; t < full; t++) probabilities[t] = 0;
        job.sum[query] = 0.0f;
        if (any_nan(row + low, full - low)) job.max[query] = job.sum[query] = __builtin_nanf("");
        return;
    }
    const F scale = set1(job.scale * 1.44269504088896341f), shift = set1(m);
    F total = zero();
    for (int t = low; t < full; t += PANEL)
#pragma GCC unroll 4
        for (int v = t; v < t + PANEL; v += 2 * LANES) {
            const F a = coarse_power(mul(sub(load(row + v), shift), scale)), b = coarse_power(mul(sub(load(row + v + LANES), shift), scale));
            total = add(total, store_bf16_sum(probabilities + v, a, b));  // of what multiplies the values, so that the weights sum to one
        }
    job.sum[query] = reduce_add(total);
}

// SCORE_ROWS queries at a time, so that their scores stay in the nearest cache.
void attend(const AttendJob& job) {
    Tiles tiles(nullptr);
    const int base = job.split * SPLIT, dim = job.head_dim, padded = job.padded_dim;
    Seen all{SPLIT, 0};
    for (int i = 0; i < job.queries; i++) {
        const Seen seen = seen_of(job, i);
        if (seen.begin < all.begin) all.begin = seen.begin;
        if (seen.end > all.end) all.end = seen.end;
    }
    const int packed = all.begin / PANEL * PANEL;
    bf16* keys = (bf16*)job.scratch;
    bf16* values = keys + (std::ptrdiff_t)SPLIT * padded;
    float* scores = (float*)(values + (std::ptrdiff_t)SPLIT * padded);
    bf16* weights = (bf16*)(scores + (std::ptrdiff_t)SCORE_ROWS * SPLIT);
    if (packed < all.end) {
        pack_keys(job.kv, base, packed, all.end, dim, padded, keys, job.upcoming);
        pack_values(job.kv, base, all.begin, all.end, dim, padded, values, job.upcoming);
    }
    bool spoilt = false;
    for (int from = 0; from < job.queries; from += SCORE_ROWS) {
        const int count = job.queries - from < SCORE_ROWS ? job.queries - from : SCORE_ROWS;
        int low = SPLIT, end = 0;
        for (int i = from; i < from + count; i++) {
            const Seen seen = seen_of(job, i);
            if (seen.begin < low) low = seen.begin;
            if (seen.end > end) end = seen.end;
        }
        low = low / PANEL * PANEL;
        if (end <= low) {
            for (int i = from; i < from + count; i++) job.max[i] = -__builtin_inff(), job.sum[i] = 0.0f;
            continue;
        }
        const int full = (int)round_up((std::size_t)end, PANEL);
        const std::ptrdiff_t panel = padded * PANEL;
        tiles.plain(count, (full - low) / PANEL, {job.q + (std::ptrdiff_t)from * padded, nullptr, padded}, padded, keys + low / PANEL * panel, panel, scores + low, SPLIT);
        for (int i = 0; i < count; i++) soften(job, from + i, low, full, scores + (std::ptrdiff_t)i * SPLIT, weights + (std::ptrdiff_t)i * SPLIT);
        float* out = job.out + (std::ptrdiff_t)from * padded;
        tiles.plain(count, padded / PANEL, {weights + low, nullptr, SPLIT}, full - low, values + low * PANEL, SPLIT * PANEL, out, padded);
        spoilt = spoilt || any_nan(out, count * padded);
    }
    // 0 * NaN is NaN: a value that is not finite spoils the queries that do not see it. Each is then computed by itself.
    if (spoilt && job.queries > 1)
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

// A part and what came before it: the larger maximum counts, so one of the factors is 1.
void merge(float part_max, float part_sum, const float* part, int padded_dim, float* max_, float* sum, float* out) {
    if (part_max == -__builtin_inff()) return;
    const float rise = part_max - *max_;
    const F factor = exponential(set1(rise > 0.0f ? -rise : rise));
    const F old = rise > 0.0f ? factor : set1(1.0f), fresh = rise > 0.0f ? set1(1.0f) : factor;
    for (int d = 0; d < padded_dim; d += LANES) store(out + d, fma(load(part + d), fresh, mul(load(out + d), old)));
    float old_sum[LANES], fresh_sum[LANES];
    store(old_sum, old);
    store(fresh_sum, fresh);
    *sum = part_sum * fresh_sum[0] + *sum * old_sum[0];
    *max_ = rise > 0.0f ? part_max : *max_;
}

void finish(const float* acc, float sum, int head_dim, bf16* out) {
    float row[1024];
    for (int k = 0; k < head_dim; k++) row[k] = acc[k] / sum;
    to_bf16(row, head_dim, out);
}

