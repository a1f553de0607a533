"""Pearson's chi-square test of sampled tokens against a model's log-probabilities. Uses only the standard library."""

import math

# By how much a wrong rule, with noise of their own for draft and target, raises the odds of the likeliest token.
ODDS = (0.63 / 0.37) / (0.60 / 0.40)


def chi_square_p(statistic, degrees):
    """The probability that a chi-square variable with so many degrees of freedom is larger.

    >>> [round(chi_square_p(*case), 4) for case in [(3.8415, 1), (5.9915, 2), (18.307, 10), (124.342, 100), (0, 3)]]
    [0.05, 0.05, 0.05, 0.05, 1.0]
    """
    if statistic <= 0:
        return 1.0
    half = statistic / 2
    # Q(1/2, x) or Q(1, x), and from there Q(a + 1, x) = Q(a, x) + x^a e^-x / Gamma(a + 1).
    a, p = (0.5, math.erfc(math.sqrt(half))) if degrees % 2 else (1.0, math.exp(-half))
    while a < degrees / 2:
        p += math.exp(a * math.log(half) - half - math.lgamma(a + 1))
        a += 1
    return min(1.0, p)


def statistic(counts, weights):
    """Pearson's chi-square.

    >>> round(statistic([44, 56], [0.5, 0.5]), 2)
    1.44
    """
    total = sum(counts)
    return sum((count - total * p) ** 2 / (total * p) for count, p in zip(counts, weights))


def categories(logprobs, count):
    """The two likeliest tokens and their probabilities, and last None for all others; each is expected five times or more.
    With more of them, the test would need more samples to see that the likeliest is too frequent.

    >>> categories({"a": math.log(0.5), "b": math.log(0.3), "c": math.log(0.001)}, 100)
    (['a', 'b', None], [0.5, 0.3, 0.2])
    """
    found = sorted(((math.exp(value), token) for token, value in logprobs.items()), reverse=True)[:2]
    found = [(p, token) for p, token in found if p * count >= 5]
    rest = 1 - sum(p for p, _ in found)
    if rest * count < 5 and found:
        # Too rare to be a category of its own: the rarest joins it.
        rest, found = rest + found[-1][0], found[:-1]
    return [token for _, token in found] + [None], [round(p, 12) for p, _ in found] + [round(rest, 12)]


def wrong_rule(weights):
    """The probabilities, likeliest first, under a rule that favours the likeliest token, as drafts usually are.

    >>> [round(p, 3) for p in wrong_rule([0.6, 0.3, 0.1])]
    [0.63, 0.277, 0.092]
    """
    raised = [weights[0] * ODDS, *weights[1:]]
    return [weight / sum(raised) for weight in raised]
