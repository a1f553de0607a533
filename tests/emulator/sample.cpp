// Compares sampling and verification with a plain reference in f64 that sorts.
#include "sample/sample.cu"
#include "sample/top_logits.cu"

#include "process.h"

namespace {

constexpr int VOCAB = 5000;

double uniform() { return std::uniform_real_distribution<double>()(rng); }

// Logits of a peaked distribution; with `steps`, many are equal.
vector<float> noise(bool steps) {
    std::normal_distribution<float> normal(0, 3);
    vector<float> logits(VOCAB);
    for (float &x : logits) {
        x = normal(rng);
        x = steps ? std::round(x) : x;
    }
    return logits;
}

// The logits processors, by their definition.
vector<double> reference(const float *logits, LogitsParams s) {
    float top = *std::max_element(logits, logits + VOCAB);
    vector<double> w(VOCAB);
    vector<int> order(VOCAB);
    for (int i = 0; i < VOCAB; i++) {
        w[i] = std::exp(((double)logits[i] - top) / s.temperature);
        w[i] = w[i] < s.min_p ? 0 : w[i];
        order[i] = i;
    }
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return w[a] > w[b]; });
    if (s.top_k > 0) {
        double least = w[order[s.top_k - 1]];
        for (double &x : w) {
            x = x < least ? 0 : x;
        }
    }
    double total = 0, kept = 0;
    for (double x : w) {
        total += x;
    }
    for (int id : order) {
        w[id] = kept < s.top_p * total * (1 - 1e-12) ? w[id] : 0;
        kept += w[id];
    }
    for (double &x : w) {
        x /= kept;
    }
    return w;
}

int quantile_of(const vector<double> &p, double target) {
    int last = 0;
    for (int i = 0; i < VOCAB; i++) {
        if (p[i] > 0) {
            last = i;
            target -= p[i];
            if (target < 0) {
                break;
            }
        }
    }
    return last;
}

// A row whose token is drawn by a quantile.
LogitsParams by_quantile(uint32_t row, uint32_t top_k, float temperature, float min_p, float top_p, double uniform) {
    return {row, top_k, temperature, min_p, top_p, 0, 0, uniform};
}

Processed process(const vector<float> &logits, const vector<LogitsParams> &params, int siblings) {
    return process(logits, params, siblings, VOCAB);
}

void test_process() {
    const float P[] = {1.f, 0.9f, 0.3f}, MIN[] = {0.f, 0.02f};
    const uint32_t K[] = {0, 40, 1};
    for (bool steps : {false, true}) {
        vector<float> logits;
        vector<LogitsParams> params;
        for (float top_p : P) {
            for (float min_p : MIN) {
                for (uint32_t top_k : K) {
                    auto row = noise(steps);
                    logits.insert(logits.begin(), row.begin(), row.end());
                    params.push_back(by_quantile(0, top_k, top_p < .5f ? 1.5f : 0.7f, min_p, top_p, uniform()));
                }
            }
        }
        params.push_back(by_quantile(0, 0, 0.f, 0.f, 1.f, 0.));
        int rows = params.size();
        auto row = noise(steps);
        row[17] = row[4000] = 99;
        row[3] = -INFINITY;
        logits.insert(logits.end(), row.begin(), row.end());
        for (int i = 0; i < rows; i++) {
            params[i].row = i;
        }
        auto got = process(logits, params, 1);
        for (int i = 0; i + 1 < rows; i++) {
            auto want = reference(&logits[i * VOCAB], params[i]);
            double worst = 0;
            for (int id = 0; id < VOCAB; id++) {
                worst = std::max(worst, std::fabs(got.probs[i * VOCAB + id] - want[id]));
            }
            const LogitsParams &s = params[i];
            CHECK(worst < 1e-6, "top-k %u, top-p %g, min-p %g, equals %d: off by %g", s.top_k, s.top_p,
                  s.min_p, steps, worst);
            int token = quantile_of(want, s.uniform);
            CHECK((int)got.ids[i] == token && got.points()[i] == got.ids[i], "%u is drawn instead of %d", got.ids[i],
                  token);
            CHECK(off(got.prob(i, 0), want[token]) < 1e-6, "a token of %g has %g", want[token], got.prob(i, 0));
        }
        CHECK(got.points()[rows - 1] == 17, "%u is the largest", got.points()[rows - 1]);
    }
}

// The exponential numbers of a race: all bits of many (the test of `gumbel_max.rs` has the same hash of them),
// their moments, and their distribution.
void test_exponential() {
    uint64_t hash = 0;
    for (uint32_t id = 0; id < 1 << 18; id++) {
        hash = (hash ^ __float_as_uint(exponential(id * 0x9e3779b97f4a7c15u, id))) * 0x100000001b3u;
    }
    CHECK(hash == 0x997ad0e8ab2aa143, "the hash of the numbers is %lx", (unsigned long)hash);
    const int COUNT = 400000;
    const uint64_t KEY = 0x0123456789abcdef;
    double sum = 0, squares = 0, products = 0, last = 0;
    vector<float> all(COUNT);
    for (int i = 0; i < COUNT; i++) {
        double e = all[i] = exponential(KEY, i);
        CHECK(e > 0 && e < 17, "%g", e);
        sum += e;
        squares += e * e;
        products += e * last;
        last = e;
    }
    double mean = sum / COUNT;
    CHECK(std::fabs(mean - 1) < 0.01, "the mean is %g", mean);
    CHECK(std::fabs(squares / COUNT - 2) < 0.05, "the second moment is %g", squares / COUNT);
    CHECK(std::fabs(products / COUNT - 1) < 0.01, "neighbours have %g", products / COUNT);
    // Kolmogorov and Smirnov's distance.
    std::sort(all.begin(), all.end());
    double worst = 0;
    for (int i = 0; i < COUNT; i++) {
        worst = std::max(worst, std::fabs(-std::expm1(-(double)all[i]) - (i + 0.5) / COUNT));
    }
    CHECK(worst < 1.63 / std::sqrt(COUNT), "the distribution is off by %g", worst);
}

// The ids by `value`, largest first; of equal ones the lowest id first.
template <typename F> vector<int> order_by(F value) {
    vector<int> order(VOCAB);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return value(a) > value(b); });
    return order;
}

// Races and the best logits, with all filters, and up to 8 tokens a row.
void test_best() {
    const float P[] = {1.f, 0.9f, 0.3f}, MIN[] = {0.f, 0.02f};
    const uint32_t K[] = {0, 40, 3};
    for (auto [siblings, steps] : {std::pair{0, false}, {1, true}, {2, false}, {8, false}, {8, true}}) {
        vector<float> logits;
        vector<LogitsParams> params;
        for (float top_p : P) {
            for (float min_p : MIN) {
                for (uint32_t top_k : K) {
                    for (float temperature : {0.f, top_p < .5f ? 1.5f : 0.7f}) {
                        auto row = noise(steps);
                        logits.insert(logits.end(), row.begin(), row.end());
                        uint64_t key = (uint64_t)rng() << 32 | rng();
                        params.push_back({(uint32_t)params.size(), top_k, temperature, min_p, top_p, 1, key, 0.});
                    }
                }
            }
        }
        auto got = process(logits, params, siblings);
        int few = 0;
        for (size_t i = 0; i < params.size(); i++) {
            const auto &s = params[i];
            const float *row = &logits[i * VOCAB];
            const bool greedy = s.temperature == 0;
            auto p = reference(row, greedy ? by_quantile(0, 0, 1, 0, 1, 0) : s);
            auto score = [&](int id) { return greedy ? row[id] : p[id] / exponential(s.key, id); };
            auto order = order_by(score);
            for (size_t place = 0; place < got.places; place++) {
                uint32_t want = p[order[place]] > 0 ? order[place] : NO_TOKEN, token = got.token(i, place);
                double prob = siblings == 0 || want == NO_TOKEN ? 0 : p[want];
                few += want == NO_TOKEN;
                CHECK(token == want && off(got.prob(i, place), prob) < 1e-6,
                      "row %zu of %d siblings, place %zu: %u of %g, not %u of %g", i, siblings, place, token,
                      got.prob(i, place), want, prob);
            }
            CHECK(got.ids[i] == got.token(i, 0), "a model is fed with %u", got.ids[i]);
        }
        CHECK(siblings > 1 ? few > 0 : few == 0, "%d places have no token", few);
    }
}

// The largest logits of rows, few and many of them, also of equal logits, and where some are not finite.
void test_top_logits() {
    const int ROWS = 6;
    vector<float> logits;
    for (int row = 0; row < ROWS; row++) {
        auto one = noise(row % 2);
        logits.insert(logits.end(), one.begin(), one.end());
    }
    std::fill(&logits[2 * VOCAB], &logits[3 * VOCAB], -1.5f);
    logits[3 * VOCAB + 4711] = INFINITY;
    std::fill(&logits[4 * VOCAB], &logits[5 * VOCAB - 9], -INFINITY);
    std::fill(&logits[5 * VOCAB], &logits[6 * VOCAB], 0.f);
    logits[5 * VOCAB + 3] = -0.f;
    logits[5 * VOCAB + 7] = NAN;
    logits[5 * VOCAB + 9] = -NAN;
    for (int k : {1, 2, 32, 257, VOCAB - 1, VOCAB}) {
        const size_t width = 2 * k + 2;
        vector<uint32_t> top(ROWS * width, 77);
        launch({ROWS, 1, 1}, 1024, [&] { top_logits(logits.data(), top.data(), VOCAB, k); });
        for (int row = 0; row < ROWS; row++) {
            const float *of = &logits[row * VOCAB];
            auto bits = [&](int id) {
                int32_t x = __float_as_int(of[id]);
                return x < 0 ? x ^ 0x7fffffff : x;
            };
            auto order = order_by(bits);
            double rest = 0;
            for (int place = k; place < VOCAB; place++) {
                rest += std::exp((double)of[order[place]] - of[order[0]]);
            }
            const uint32_t *got = &top[row * width];
            vector<int> ids(got, got + k);
            for (int place = 0; place < k; place++) {
                uint32_t id = ids[place];
                CHECK(id < VOCAB && got[k + place] == __float_as_uint(of[id]), "row %d has %u at place %d of %d", row, id,
                      place, k);
            }
            std::sort(ids.begin(), ids.end());
            std::sort(order.begin(), order.begin() + k);
            CHECK(std::equal(ids.begin(), ids.end(), order.begin()), "row %d has other %d ids", row, k);
            double sum;
            memcpy(&sum, got + 2 * k, sizeof sum);
            CHECK(rest == rest ? std::fabs(sum - rest) <= 1e-12 * rest : sum != sum, "row %d, %d values: %g, not %g", row, k,
                  sum, rest);
        }
    }
}

// A row without a valid token is reported, wherever the invalid value is, and does not affect others.
void test_not_finite() {
    const float ODD[] = {NAN, -NAN, INFINITY};
    for (float temperature : {0.f, 0.8f}) {
        for (auto [siblings, by_race] : {std::pair{0, 0u}, {1, 0u}, {0, 1u}, {4, 1u}}) {
            vector<float> logits;
            vector<LogitsParams> params;
            auto add = [&](vector<float> row) {
                logits.insert(logits.end(), row.begin(), row.end());
                params.push_back({(uint32_t)params.size(), 0, temperature, 0.f, 1.f, by_race, rng(), uniform()});
            };
            for (int at : {0, 31, 1024, VOCAB - 1}) {
                for (float odd : ODD) {
                    auto row = noise(false);
                    row[at] = odd;
                    add(row);
                    add(noise(false));
                }
            }
            add(vector<float>(VOCAB, -INFINITY));
            auto got = process(logits, params, siblings);
            for (size_t i = 0; i < params.size(); i++) {
                bool none = i % 2 == 0;
                for (size_t place = 1; none && place < got.places; place++) {
                    CHECK(got.token(i, place) == NO_TOKEN, "row %zu has a sibling", i);
                }
                CHECK((got.points()[i] == NO_TOKEN) == none, "row %zu at %g: %u", i, temperature, got.points()[i]);
                CHECK(got.ids[i] < VOCAB, "a model is fed with %u", got.ids[i]);
            }
        }
    }
}

void test_adjust() {
    vector<float> logits(2 * VOCAB, 3.f);
    logits[VOCAB + 7] = -3.f;
    const vector<RowAdjustment> adjustments = {{0, 5, 2.f, 0.5f, 0.f}, {0, 5, 1.f, 0.f, -INFINITY},
                                {1, 5, 2.f, 0.5f, 0.f}, {1, 7, 2.f, 0.f, 1.f}};
    launch({1, 1, 1}, 256, [&] { adjust_logits(logits.data(), adjustments.data(), adjustments.size(), VOCAB); });
    CHECK(logits[5] == -INFINITY && logits[VOCAB + 5] == 1.f && logits[VOCAB + 7] == -5.f,
          "adjustments give %g, %g, %g", logits[5], logits[VOCAB + 5], logits[VOCAB + 7]);
    logits[5] = logits[VOCAB + 5] = logits[VOCAB + 7] = 3.f;
    CHECK(logits == vector<float>(2 * VOCAB, 3.f), "adjustments change other logits");
}

// Block verification by its definition (Sun et al. 2024, Algorithm 2); q is empty if no model predicted the draft.
struct Case {
    vector<vector<double>> p, q;
    vector<uint32_t> drafted;
    vector<double> accept, draw;
    double synthetic_acceptance;
};

// What a path of `kept` drafted tokens with this weight leaves of p for the token after it, and its mass.
vector<double> rest_of(const Case &c, size_t kept, double weight, double &mass) {
    vector<double> rest = c.p[kept];
    mass = 0;
    for (int i = 0; i < VOCAB; i++) {
        double q = 0;
        if (kept < c.drafted.size()) {
            bool point = c.q[kept].empty();
            q = point ? double(i == (int)c.drafted[kept]) : i < (int)c.q[kept].size() ? c.q[kept][i] : 0;
        }
        rest[i] = std::max(0., weight * rest[i] - q);
        mass += rest[i];
    }
    return rest;
}

// The verdict if row `broken` has no token; -1 = every row has one.
std::pair<uint32_t, uint32_t> verdict(const Case &c, size_t broken = -1) {
    const size_t len = c.drafted.size();
    size_t kept = 0;
    vector<double> weights = {1}, rest;
    if (c.synthetic_acceptance >= 0) {
        while (kept < len && kept != broken && c.accept[kept] < c.synthetic_acceptance) {
            kept++;
        }
        rest = c.p[kept];
    } else {
        for (; kept < len && kept != broken; kept++) {
            uint32_t x = c.drafted[kept];
            double q = c.q[kept].empty() ? 1 : c.q[kept][x], p = c.p[kept][x];
            if (p <= 0) {
                break;
            }
            weights.push_back(std::min(1., weights[kept] * p / q));
        }
        for (;; kept--) {
            double weight = weights[kept], mass;
            rest = rest_of(c, kept, weight, mass);
            double stands = kept == broken ? weight : mass / (mass + 1 - weight);
            if (kept == 0 || weight == 1 || c.accept[kept - 1] < stands) {
                break;
            }
        }
    }
    double sum = 0;
    for (double x : rest) {
        sum += x;
    }
    for (double &x : rest) {
        x /= sum;
    }
    return {kept, kept == broken ? NO_TOKEN : quantile_of(rest, c.draw[kept])};
}

void test_verify() {
    const int CASES = 60, LEN = 3, ROWS = LEN + 1;
    vector<float> logits;
    vector<LogitsParams> params;
    vector<vector<float>> qs;
    vector<Case> cases(CASES);
    int accepted[2] = {};
    for (int at = 0; at < CASES; at++) {
        Case &c = cases[at];
        c.synthetic_acceptance = at % 6 == 5 ? 0.5 : -1;
        auto base = noise(false);
        for (int row = 0; row < ROWS; row++) {
            logits.insert(logits.end(), base.begin(), base.end());
            auto s = by_quantile(params.size(), 0, at % 6 == 4 ? 0.f : 0.8f, 0.f, at % 2 ? 0.9f : 1.f, uniform());
            c.p.push_back(reference(base.data(), by_quantile(0, 0, s.temperature > 0 ? s.temperature : 1e-4f, 0, s.top_p, 0)));
            params.push_back(s);
            c.draw.push_back(s.uniform);
            if (row == LEN) {
                break;
            }
            // A draft that is almost right, with a smaller vocabulary; or one that no model predicted.
            auto near = base;
            for (float &x : near) {
                x += (float)uniform();
            }
            near.resize(VOCAB, -INFINITY);
            std::fill(near.end() - 100, near.end(), -INFINITY);
            auto q = reference(near.data(), by_quantile(0, 0, 0.8f, 0, 1, 0));
            c.accept.push_back(uniform());
            if (at % 6 < 3) {
                c.drafted.push_back(quantile_of(q, uniform()));
                q.resize(VOCAB - 100);
                c.q.push_back(q);
            } else {
                c.drafted.push_back(quantile_of(c.p[row], at % 6 == 4 ? 0.5 : uniform()));
                c.q.push_back({});
            }
            base = noise(false);
        }
    }
    vector<Node> nodes;
    vector<Chain> chains;
    for (int at = 0; at < CASES; at++) {
        for (auto &q : cases[at].q) {
            qs.emplace_back(q.begin(), q.end());
        }
        chains.push_back({(uint32_t)(at * LEN), LEN, (uint32_t)(at * ROWS), cases[at].synthetic_acceptance});
    }
    for (int i = 0; i < CASES * LEN; i++) {
        const Case &c = cases[i / LEN];
        const float *q = qs[i].empty() ? nullptr : qs[i].data();
        nodes.push_back({q, c.accept[i % LEN], c.drafted[i % LEN], (uint32_t)qs[i].size()});
    }
    auto rows = process(logits, params, 0);
    vector<Verdict> verdicts(CASES);
    launch({CASES, 1, 1}, 1024, [&] {
        verify_chains(rows.probs.data(), rows.points(), params.data(), nodes.data(), chains.data(),
                      verdicts.data(), VOCAB);
    });
    for (int at = 0; at < CASES; at++) {
        auto want = verdict(cases[at]);
        CHECK(verdicts[at].accepted == want.first && verdicts[at].next == want.second,
              "verdict %d: %u kept, then %u, instead of %u and %u", at, verdicts[at].accepted,
              verdicts[at].next, want.first, want.second);
        accepted[want.first == LEN] += 1;
    }
    CHECK(accepted[0] > 5 && accepted[1] > 5, "the cases are not various: %d, %d", accepted[0], accepted[1]);

    // If a row is not finite, the draft ends there: the verdict is NO_TOKEN if all tokens before it stand.
    for (int broken = 0; broken < ROWS; broken++) {
        auto odd = logits;
        for (int at = 0; at < CASES; at++) {
            odd[(size_t)(at * ROWS + broken) * VOCAB + 7] = NAN;
        }
        auto rows = process(odd, params, 0);
        vector<Verdict> got(CASES);
        launch({CASES, 1, 1}, 1024, [&] {
            verify_chains(rows.probs.data(), rows.points(), params.data(), nodes.data(), chains.data(), got.data(),
                          VOCAB);
        });
        for (int at = 0; at < CASES; at++) {
            auto [kept, next] = verdict(cases[at], broken);
            CHECK(got[at].next == next && got[at].accepted == kept,
                  "verdict %d, row %d broken: %u kept, then %u", at, broken, got[at].accepted, got[at].next);
        }
    }
}

} // namespace

void test_sample() {
    test_adjust();
    test_process();
    test_kinds();
    test_exponential();
    test_best();
    test_best_logits();
    test_top_logits();
    test_not_finite();
    test_verify();
}
