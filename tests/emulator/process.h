// Runs the kernels that process logits, and compares the tokens of rows of all kinds and lengths with a plain
// reference. For sample.cpp, which has the kernels.
#pragma once
#include "check.h"
#include <numeric>

namespace {

using emulator::launch;
using std::vector;

// The results of the kernels. `tokens` are [2n, rows].
struct Processed {
    size_t rows, places;
    vector<float> probs;
    vector<uint32_t> ids, tokens;

    const uint32_t *points() const { return tokens.data(); }
    uint32_t token(size_t row, size_t place) const { return tokens[place * rows + row]; }
    float prob(size_t row, size_t place) const { return __uint_as_float(tokens[(places + place) * rows + row]); }
};

int pieces_of(int vocab) { return std::max((vocab + PIECE - 1) / PIECE, 1); }

// Launches a kernel with a block for each piece of each row. A GPU has no order of blocks, so the pieces are in a
// random one.
void launch_pieces(int rows, int vocab, const std::function<void()> &kernel) {
    const int pieces = pieces_of(vocab);
    vector<int> order(pieces);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), rng);
    launch({rows, 1, pieces}, PIECE_THREADS, [&] {
        blockIdx.y = order[blockIdx.z];
        gridDim.y = pieces;
        kernel();
    });
}

// Launches all kernels, also those that no row needs.
Processed process(const vector<float> &logits, vector<LogitsParams> params, int siblings, int vocab) {
    size_t rows = params.size(), places = std::max(siblings, 1);
    Processed out{rows, places, vector<float>(rows * vocab), vector<uint32_t>(rows, 77),
                  vector<uint32_t>(2 * places * rows, 77)};
    vector<Found> found(rows * (1 + pieces_of(vocab)), {NAN, 77, NAN});
    launch_pieces(rows, vocab, [&] {
        largest_logits(logits.data(), params.data(), found.data(), out.ids.data(), out.tokens.data(), vocab, siblings);
    });
    launch_pieces(rows, vocab, [&] {
        weigh_logits(logits.data(), params.data(), found.data(), out.ids.data(), out.tokens.data(), vocab, siblings);
    });
    launch({(int)rows, 1, 1}, 1024, [&] {
        process_logits(logits.data(), params.data(), found.data(), out.probs.data(), out.ids.data(), out.tokens.data(),
                       vocab, siblings);
    });
    for (const LogitsParams &row : params) {
        CHECK(row.arrived == 0, "a counter is left at %u", row.arrived);
    }
    return out;
}

// The token of a row without filters that is greedy or a race, and its probability.
std::pair<uint32_t, float> choose(const float *row, int vocab, const LogitsParams &s) {
    float top = -INFINITY;
    for (int i = 0; i < vocab; i++) {
        if (!(row[i] < INFINITY)) {
            return {NO_TOKEN, 0.f};
        }
        top = std::max(top, row[i]);
    }
    if (top == -INFINITY) {
        return {NO_TOKEN, 0.f};
    }
    const bool greedy = s.temperature == 0;
    double total = 0;
    float best = -1, own = 0;
    uint32_t token = NO_TOKEN;
    for (int i = 0; i < vocab; i++) {
        float w = portable_exp((row[i] - top) / (greedy ? 1 : s.temperature));
        w = !greedy && w < s.min_p ? 0 : w;
        total += w;
        float score = greedy ? float(row[i] == top) : w / exponential(s.key, i);
        if (score > best) {
            best = score;
            token = i;
            own = w;
        }
    }
    return {token, float(own / total)};
}

// Logits of one of seven kinds: plain, many equal, all equal, with NaN, with infinity, without a number, and with
// only one, which is the last.
vector<float> odd_logits(int kind, int vocab) {
    vector<float> row = noise<float>(vocab);
    const size_t at = rng() % vocab;
    for (float &x : row) {
        x = kind == 1 ? std::round(x) : kind == 2 ? -2.5f : kind >= 5 ? -INFINITY : 3 * x;
    }
    if (kind == 3 || kind == 4) {
        row[at] = kind == 3 ? NAN : INFINITY;
    } else if (kind == 6) {
        row[vocab - 1] = 1;
    }
    return row;
}

// Vocabularies of less than a piece, of one, of some, and with a last piece of one value; in one launch, rows that
// blocks share and rows that have a block of their own.
void test_kinds() {
    for (int vocab : {1, 7, 1000, PIECE, PIECE + 1, 4099, 32003, 128256}) {
        vector<float> logits;
        vector<LogitsParams> params;
        vector<bool> plain;
        auto add = [&](vector<float> row, uint32_t top_k, float temperature, float min_p, float top_p, bool by_race) {
            logits.insert(logits.end(), row.begin(), row.end());
            const uint64_t key = (uint64_t)rng() << 32 | rng();
            params.push_back({(uint32_t)params.size(), top_k, temperature, min_p, top_p, by_race, key, 0.3});
            plain.push_back(temperature == 0 || (by_race && top_k == 0 && top_p == 1.f));
        };
        for (int kind = 0; kind < 7; kind++) {
            add(odd_logits(kind, vocab), 0, 0.f, 0.f, 1.f, true);
            // A greedy row has no filters.
            add(odd_logits(kind, vocab), 5, 0.f, 0.5f, 0.3f, false);
            add(odd_logits(kind, vocab), 0, 1.f, 0.f, 1.f, true);
            add(odd_logits(kind, vocab), 0, 0.7f, 0.02f, 1.f, true);
        }
        // Rows that are neither the first nor in the order of the logits.
        std::reverse(params.begin(), params.end());
        std::reverse(plain.begin(), plain.end());
        add(odd_logits(0, vocab), 0, 0.7f, 0.f, 1.f, false);
        add(odd_logits(1, vocab), 3, 0.7f, 0.f, 1.f, true);
        add(odd_logits(0, vocab), 0, 1.5f, 0.f, 0.9f, true);
        add(odd_logits(4, vocab), 0, 1.5f, 0.f, 0.9f, true);
        const Processed none = process(logits, params, 0, vocab), one = process(logits, params, 1, vocab),
                        two = process(logits, params, 2, vocab);
        for (size_t i = 0; i < params.size(); i++) {
            const Processed alone = process(logits, {params[i]}, 1, vocab);
            CHECK(alone.token(0, 0) == one.token(i, 0) && alone.prob(0, 0) == one.prob(i, 0),
                  "row %zu of %d logits depends on others", i, vocab);
            CHECK(two.token(i, 0) == one.token(i, 0) && two.prob(i, 0) == one.prob(i, 0),
                  "row %zu of %d logits: %u of %g with a sibling, %u of %g alone", i, vocab, two.token(i, 0),
                  two.prob(i, 0), one.token(i, 0), one.prob(i, 0));
            if (!plain[i]) {
                continue;
            }
            auto [token, prob] = choose(&logits[(size_t)params[i].row * vocab], vocab, params[i]);
            CHECK(none.token(i, 0) == token && none.prob(i, 0) == 0, "row %zu of %d logits: %u, not %u", i, vocab,
                  none.token(i, 0), token);
            CHECK(one.token(i, 0) == token && std::fabs(one.prob(i, 0) - prob) <= 1e-7 * prob,
                  "row %zu of %d logits: %u of %g, not %u of %g", i, vocab, one.token(i, 0), one.prob(i, 0), token, prob);
            CHECK(one.ids[i] == (token == NO_TOKEN ? 0 : token), "a model is fed with %u", one.ids[i]);
        }
    }
}

void test_best_logits() {
    const int KINDS = 7;
    for (int vocab : {1, 7, PIECE, PIECE + 1, 5000, 32003}) {
        vector<float> logits;
        for (int row = 0; row < KINDS; row++) {
            auto one = odd_logits(row, vocab);
            logits.insert(logits.end(), one.begin(), one.end());
        }
        for (int count : {1, 3, 8}) {
            vector<Found> found(KINDS * pieces_of(vocab) * count, {NAN, 77, NAN});
            vector<uint32_t> ids(KINDS * count, 77), arrived(KINDS);
            launch_pieces(KINDS, vocab, [&] {
                best_logits(logits.data(), found.data(), arrived.data(), ids.data(), vocab, count);
            });
            CHECK(arrived == vector<uint32_t>(KINDS), "a counter of %d logits is left", vocab);
            for (int row = 0; row < KINDS; row++) {
                const float *of = &logits[(size_t)row * vocab];
                vector<uint32_t> order(vocab);
                std::iota(order.begin(), order.end(), 0);
                std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return of[a] > of[b]; });
                const bool finite = row != 3 && row != 4;
                for (int place = 0; place < count; place++) {
                    bool exists = finite && place < vocab && of[order[place]] > -INFINITY;
                    uint32_t want = exists ? order[place] : NO_TOKEN, got = ids[row * count + place];
                    CHECK(got == want, "row %d of %d logits, place %d: %u, not %u", row, vocab, place, got, want);
                }
            }
        }
    }
}

} // namespace
