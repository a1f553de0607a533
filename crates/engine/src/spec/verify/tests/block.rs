//! Chains under the rejection rule: several tokens jointly, exactly by enumeration and by sampling.

use super::super::Block;
use super::push;
use crate::spec::draft::Draft;
use foretoken_core::sampling::{Dist, Purpose, Rng, Sampler, SamplingParams, distribution, mix};

const VOCAB: u32 = 4;

/// The longest text after which a token is drawn.
const MAX_LEN: u32 = 5;

/// A target and a draft model whose distributions depend on all tokens before, and a request's parameters.
struct Pair {
    params: SamplingParams,
    /// The distributions of the target and of the draft model, by the length and the [`place`] of the text before.
    dists: [Vec<Vec<Dist>>; 2],
}

impl Pair {
    fn all() -> Vec<Self> {
        let params = |temperature, top_k, top_p, min_p| SamplingParams {
            temperature,
            top_k,
            top_p,
            min_p,
            ..SamplingParams::default()
        };
        let requests = [
            params(1.0, 0, 1.0, 0.0),
            params(0.6, 0, 1.0, 0.0),
            params(1.3, 3, 1.0, 0.0),
            params(1.0, 0, 0.85, 0.0),
            params(1.5, 0, 1.0, 0.2),
        ];
        let pairs = requests.into_iter().zip(1..);
        pairs
            .map(|(params, seed)| Self::new(seed, params))
            .collect()
    }

    fn new(seed: u64, params: SamplingParams) -> Self {
        let sampler = Sampler::new(params.clone(), &[]);
        let after = |model: u64, text: Vec<u32>| {
            let hash = |hash: u64, &id: &u32| mix(hash ^ u64::from(id + 1));
            let context = text.iter().fold(mix(seed ^ mix(model)), hash);
            let logit = |id| (mix(context ^ mix(id)) >> 40) as f32 / (1 << 22) as f32;
            let logits: Vec<f32> = (0..u64::from(VOCAB)).map(logit).collect();
            distribution(&logits, &sampler).unwrap()
        };
        let of = |model| {
            let level = |len| texts(len).map(|text| after(model, text)).collect();
            (0..=MAX_LEN).map(level).collect()
        };
        let dists = [of(1), of(2)];
        Self { params, dists }
    }

    fn target(&self, path: &[u32]) -> Dist {
        self.dists[0][path.len()][place(path)].clone()
    }

    fn draft(&self, path: &[u32]) -> Dist {
        self.dists[1][path.len()][place(path)].clone()
    }

    /// The draft of `tokens`, and its probability.
    fn chain(&self, tokens: &[u32]) -> (Draft, f64) {
        let (mut draft, mut prob) = (Draft::default(), 1.0);
        for (i, &token) in tokens.iter().enumerate() {
            let q = self.draft(&tokens[..i]);
            prob *= q.prob(token);
            push(&mut draft, token, q);
        }
        (draft, prob)
    }

    fn block<'a>(&self, draft: &'a Draft) -> Block<'a> {
        let target = |path: &[usize]| Ok(self.target(&draft.tokens[..path.len()]));
        Block::new(draft, target).unwrap()
    }

    /// Probability that the target writes `tokens`.
    fn prob(&self, tokens: &[u32]) -> f64 {
        let at = |i: usize| self.target(&tokens[..i]).prob(tokens[i]);
        (0..tokens.len()).map(at).product()
    }
}

/// All texts of `len` tokens, in the order of [`place`].
fn texts(len: u32) -> impl Iterator<Item = Vec<u32>> {
    let digits = move |text: u32| (0..len).map(move |i| text / VOCAB.pow(i) % VOCAB);
    (0..VOCAB.pow(len)).map(move |text| digits(text).collect())
}

fn place(tokens: &[u32]) -> usize {
    let digits = tokens.iter().rev();
    digits.fold(0, |place, &token| place * VOCAB as usize + token as usize)
}

/// The probability of each number of tokens that stand, 0 first.
fn lengths(block: &Block<'_>) -> Vec<f64> {
    let mut left = 1.0;
    let mut probs: Vec<f64> = (0..block.weights.len())
        .rev()
        .map(|len| {
            let stands = if len == 0 { 1.0 } else { block.end(len).stands };
            let here = left * stands;
            left -= here;
            here
        })
        .collect();
    probs.reverse();
    probs
}

/// Sun et al. 2024, Theorem 1: what stands of a draft, the token after it, and what the target then writes have
/// jointly the target's distribution. All drafts and all outcomes are enumerated.
#[test]
fn blocks_of_tokens_have_exactly_the_targets_distribution() {
    for pair in Pair::all() {
        for drafted in 1..=3 {
            let len = drafted + 1;
            let mut found = vec![0.0; VOCAB.pow(len) as usize];
            for tokens in texts(drafted) {
                let (draft, drawn) = pair.chain(&tokens);
                if drawn == 0.0 {
                    continue;
                }
                let block = pair.block(&draft);
                for (kept, prob) in lengths(&block).into_iter().enumerate() {
                    let next = block.end(kept).next.unwrap();
                    for text in texts(len).filter(|text| text[..kept] == tokens[..kept]) {
                        let rest = kept + 1..text.len();
                        let rest = rest.map(|i| pair.target(&text[..i]).prob(text[i]));
                        found[place(&text)] +=
                            drawn * prob * next.prob(text[kept]) * rest.product::<f64>();
                    }
                }
            }
            for (text, found) in texts(len).zip(found) {
                let want = pair.prob(&text);
                assert!(
                    (found - want).abs() < 1e-6,
                    "{text:?} of {:?}: {found}, not {want}",
                    pair.params
                );
            }
        }
    }
}

/// Sun et al. 2024, Theorem 2: of no draft does the rule accept fewer tokens, on average, than verification token by
/// token, and of drafts of several tokens it accepts more.
#[test]
fn a_block_accepts_no_fewer_tokens_than_one_token_after_the_other() {
    for drafted in 1..=4 {
        let mut gains = 0.0;
        for pair in Pair::all() {
            let (mut by_block, mut by_token) = (0.0, 0.0);
            for tokens in texts(drafted) {
                let (draft, drawn) = pair.chain(&tokens);
                if drawn == 0.0 {
                    continue;
                }
                let kept = lengths(&pair.block(&draft)).into_iter().enumerate();
                by_block += drawn * kept.map(|(len, prob)| len as f64 * prob).sum::<f64>();
                let mut stands = 1.0;
                for (i, &token) in tokens.iter().enumerate() {
                    let (p, q) = (pair.target(&tokens[..i]), pair.draft(&tokens[..i]));
                    stands *= (p.prob(token) / q.prob(token)).min(1.0);
                    by_token += drawn * stands;
                }
            }
            let what = format!(
                "{drafted} tokens, {:?}: {by_block}, {by_token}",
                pair.params
            );
            assert!(by_block > by_token - 1e-6, "{what}");
            gains += by_block - by_token;
        }
        match drafted {
            1 => assert!(gains < 1e-5, "{gains}"),
            _ => assert!(gains > 0.005, "{drafted} tokens: {gains}"),
        }
    }
}

/// Texts of three tokens over as many rounds as they take, with the random numbers that the engine addresses: the
/// numbers of a round, which decide about tokens beyond those that stand, must not come again in the next.
#[test]
fn several_rounds_together_have_the_targets_distribution() {
    const TEXTS: u64 = 60_000;
    const LEN: usize = 3;
    for pair in Pair::all() {
        for drafted in [2, 3] {
            let mut counts = vec![0.0; VOCAB.pow(LEN as u32) as usize];
            for seed in 0..TEXTS {
                let mut text: Vec<u32> = Vec::new();
                while text.len() < LEN {
                    let rng = Rng::at(mix(seed), 5 + text.len());
                    let (mut draft, mut path) = (Draft::default(), text.clone());
                    for i in 0..drafted {
                        let q = pair.draft(&path);
                        let token = q.sample(rng.uniform(i, Purpose::Draft, 0));
                        push(&mut draft, token, q);
                        path.push(token);
                    }
                    let target = |kept: &[usize]| Ok(pair.target(&path[..text.len() + kept.len()]));
                    let verdict = super::rejection(&draft, target, &rng).unwrap();
                    text.extend(verdict.path.iter().map(|&node| draft.tokens[node]));
                    text.push(verdict.next);
                }
                counts[place(&text[..LEN])] += 1.0;
            }
            let (mut chi_square, mut freedom) = (0.0, -1.0);
            for (text, count) in texts(LEN as u32).zip(counts) {
                let want = TEXTS as f64 * pair.prob(&text);
                if want == 0.0 {
                    assert_eq!(count, 0.0, "{text:?}");
                } else {
                    chi_square += (count - want).powi(2) / want;
                    freedom += 1.0;
                }
            }
            // Five standard deviations.
            let limit = freedom + 5.0 * (2.0_f64 * freedom).sqrt();
            assert!(
                chi_square < limit,
                "chi-square {chi_square} with {freedom} degrees of freedom, K = {drafted}, {:?}",
                pair.params
            );
        }
    }
}
