// Compares recurrent layers with sums in f64, and with themselves for other divisions of a text and for branches of drafts.
#include "recurrent/recurrent.cu"

#include "check.h"

using emulator::launch;
using recurrent::EMPTY;
using recurrent::Keep;
using recurrent::NONE;
using recurrent::Part;
using recurrent::Step;
using recurrent::Token;
using std::vector;

namespace {

// What a forward does with one sequence, whose state is in slot 0.
struct Forward {
    vector<Step> steps;
    vector<Keep> keeps;
    vector<Token> tokens;
};

// A layer of odd sizes: columns that no warp fills, rows that fill no register.
struct Layer {
    const bool is_delta;
    const int rows, heads = 4, columns = 5, taps = 3, shared = 2;
    const float least = 0.1f, most = 1.5f, eps = 1e-5f;
    const int keys = shared * rows, values = heads * columns, channels = 2 * keys + values;
    const int scalars = is_delta ? 2 * heads : heads, inputs = channels + scalars, width = values + inputs;
    vector<float> conv = noise<float>(taps * channels), bias = noise<float>(channels), decay = noise<float>(heads);
    vector<float> dt_bias = noise<float>(heads), skip = noise<float>(heads), norm = noise<float>(values);
    vector<float> state, nodes;
    uint64_t addresses[2];

    Layer(bool is_delta, int rows) : is_delta(is_delta), rows(rows) {
        for (float &factor : decay) {
            factor = -std::fabs(factor);
        }
        state.assign(heads * rows * columns + (taps - 1) * channels, 7.f);
        nodes.assign(4 * inputs, 7.f);
        addresses[0] = reinterpret_cast<uint64_t>(state.data());
        addresses[1] = reinterpret_cast<uint64_t>(nodes.data());
    }

    vector<float> run(const vector<float> &x, const Forward &forward) {
        const int count = x.size() / width, tokens = forward.tokens.size();
        // A sequence without steps comes first.
        const Part parts[] = {{0, 0, 0, 0}, {0, (int)forward.steps.size(), 0, (int)forward.keeps.size()}};
        vector<float> mixed(tokens * inputs), raw(count * values), out(count * values);
        launch({(inputs + 255) / 256, 2, 1}, 256, [&] {
            recurrent_mix_f32(x.data(), addresses, forward.tokens.data(), conv.data(), bias.data(), mixed.data(), heads,
                              columns, rows, channels, scalars, taps, tokens);
        });
        const int units = heads * ((columns + recurrent::COLUMNS - 1) / recurrent::COLUMNS);
        launch({(units + 3) / 4, 2, 1}, 128, [&] {
            if (is_delta) {
                (rows > 128 ? recurrent_delta_8 : recurrent_delta_4)(
                    parts, forward.steps.data(), addresses, mixed.data(), raw.data(), decay.data(), dt_bias.data(), heads,
                    columns, rows, channels, scalars, taps, shared, 0);
            } else {
                (rows > 128 ? recurrent_mamba_8 : recurrent_mamba_4)(
                    parts, forward.steps.data(), addresses, mixed.data(), raw.data(), decay.data(), dt_bias.data(),
                    skip.data(), heads, columns, rows, channels, scalars, taps, shared, least, most);
            }
        });
        launch({count, is_delta ? heads : shared, 1}, 32, [&] {
            recurrent_finish_f32(x.data(), raw.data(), norm.data(), out.data(), heads, columns, rows, channels, scalars, taps,
                                 is_delta ? columns : values / shared, is_delta, !is_delta, eps);
        });
        launch({(inputs + 255) / 256, 2, 1}, 256, [&] {
            recurrent_keep_f32(x.data(), addresses, forward.tokens.data(), parts, forward.keeps.data(), heads, columns, rows,
                               channels, scalars, taps);
        });
        return out;
    }

    // The outputs of a text as defined.
    vector<double> defined(const vector<float> &x) const {
        auto sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
        auto softplus = [](double x) { return std::log1p(std::exp(x)); };
        const int count = x.size() / width;
        vector<double> state(heads * rows * columns), out;
        for (int t = 0; t < count; t++) {
            const float *row = &x[t * width], *scalars = row + values + channels;
            vector<double> mixed(channels);
            for (int c = 0; c < channels; c++) {
                double sum = bias[c];
                for (int back = 0; back < taps && back <= t; back++) {
                    sum += (double)conv[back * channels + c] * x[(t - back) * width + values + c];
                }
                mixed[c] = sum * sigmoid(sum);
            }
            vector<double> read(values);
            for (int head = 0; head < heads; head++) {
                double *own = &state[head * rows * columns];
                const int at = head / (heads / shared) * rows;
                double *q = &mixed[at], *k = &mixed[keys + at], *v = &mixed[2 * keys + head * columns];
                double keep, factor = 1, q_scale = 1, k_scale = 1;
                if (is_delta) {
                    double q_square = 1e-6, k_square = 1e-6;
                    for (int i = 0; i < rows; i++) {
                        q_square += q[i] * q[i];
                        k_square += k[i] * k[i];
                    }
                    q_scale = 1 / std::sqrt(q_square * rows), k_scale = 1 / std::sqrt(k_square);
                    keep = std::exp(decay[head] * softplus(scalars[heads + head] + dt_bias[head]));
                    factor = sigmoid(scalars[head]);
                } else {
                    // x comes first, then B and C.
                    v = &mixed[head * columns], k = &mixed[values + at], q = &mixed[values + keys + at];
                    factor = std::clamp(softplus(scalars[head] + dt_bias[head]), (double)least, (double)most);
                    keep = std::exp(decay[head] * factor);
                }
                for (int c = 0; c < columns; c++) {
                    double known = 0, sum = is_delta ? 0 : skip[head] * v[c];
                    for (int i = 0; i < rows; i++) {
                        own[i * columns + c] *= keep;
                        known += is_delta ? own[i * columns + c] * k[i] * k_scale : 0;
                    }
                    for (int i = 0; i < rows; i++) {
                        own[i * columns + c] += k[i] * k_scale * (v[c] - known) * factor;
                        sum += own[i * columns + c] * q[i] * q_scale;
                    }
                    read[head * columns + c] = sum;
                }
            }
            const int group = is_delta ? columns : values / shared;
            auto gate = [&](int i) { return row[i] * sigmoid(row[i]); };
            for (int i = 0; i < values && !is_delta; i++) {
                read[i] *= gate(i);
            }
            for (int i = 0; i < values; i++) {
                double square = 0;
                for (int j = i / group * group; j < i / group * group + group; j++) {
                    square += read[j] * read[j];
                }
                const double normed = read[i] / std::sqrt(square / group + eps) * norm[is_delta ? i % columns : i];
                out.push_back(is_delta ? normed * gate(i) : normed);
            }
        }
        return out;
    }
};

void test(bool is_delta, int rows) {
    Layer layer(is_delta, rows);
    const int width = layer.width, values = layer.values;
    const vector<float> x = noise<float>(7 * width);
    Forward whole;
    for (int t = 0; t < 7; t++) {
        whole.tokens.push_back({0, t, t > 0 ? t - 1 : EMPTY});
        whole.steps.push_back({t, t, t > 0 ? NONE : EMPTY, t == 6 ? 0 : NONE});
    }
    whole.keeps = {{6, 0, NONE}};
    const vector<float> want = layer.run(x, whole);
    const vector<double> defined = layer.defined(x);
    double worst = 0;
    for (size_t i = 0; i < want.size(); i++) {
        worst = std::max(worst, off(want[i], defined[i]));
    }
    CHECK(worst < 20 * precision<float>(), "a recurrent layer with %d rows is off by %g", rows, worst);
    // Rows of the text, and one of another.
    const vector<float> wrong = noise<float>(width);
    auto take = [&](std::initializer_list<int> rows) {
        vector<float> taken;
        for (int row : rows) {
            const float *from = row < 0 ? wrong.data() : &x[row * width];
            taken.insert(taken.end(), from, from + width);
        }
        return taken;
    };
    auto check = [&](const vector<float> &found, int row, int of) {
        CHECK(same(&found[row * values], &want[of * values], values), "row %d of %d, token %d", row, rows, of);
    };
    vector<float> found = layer.run(take({0}), {{{0, 0, EMPTY, 0}}, {{0, 0, NONE}}, {{0, 0, EMPTY}}});
    check(found, 0, 0);
    found = layer.run(take({1, 2}), {{{0, 0, 0, NONE}, {1, 1, NONE, 0}}, {{1, 0, NONE}}, {{0, 0, NONE}, {0, 1, 0}}});
    check(found, 0, 1);
    check(found, 1, 2);
    // Token 3, and two branches: a wrong one, and 4 with 5 after it.
    found = layer.run(take({3, -1, 4, 5}), {{{0, 0, 0, 0}, {1, 1, NONE, NONE}, {2, 2, 0, NONE}, {3, 3, NONE, NONE}},
                                           {{0, 0, NONE}, {1, 0, 0}, {2, 0, 1}, {3, 0, 2}},
                                           {{0, 0, NONE}, {0, 1, 0}, {0, 2, 0}, {0, 3, 2}}});
    check(found, 0, 3);
    check(found, 2, 4);
    check(found, 3, 5);
    // Nodes 1 and 2 were accepted.
    found = layer.run(take({6}), {{{0, NONE, 0, NONE}, {1, NONE, NONE, NONE}, {2, 0, NONE, 0}},
                                  {{2, 0, NONE}},
                                  {{0, -2, NONE}, {0, -3, 0}, {0, 0, 1}}});
    check(found, 0, 6);
}

} // namespace

void test_recurrent() {
    for (int rows : {7, 40, 136}) {
        test(true, rows);
        test(false, rows);
    }
}
