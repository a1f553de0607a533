use super::*;
use foretoken_core::sampling::mix;

const VOCAB: u32 = 5;
const EOS: u32 = 4;

/// The log-probabilities of all tokens after `text`, in a language that `seed` names.
fn next(seed: u64, text: &[u32]) -> Vec<f32> {
    let hash = text
        .iter()
        .fold(mix(seed), |hash, &id| mix(hash ^ u64::from(id)));
    let logit = |id: u32| (mix(hash ^ mix(u64::from(id))) >> 40) as f64 / (1 << 24) as f64 * 4.0;
    let norm: f64 = (0..VOCAB).map(|id| logit(id).exp()).sum::<f64>().ln();
    (0..VOCAB).map(|id| (logit(id) - norm) as f32).collect()
}

fn best_first(scores: &[f32], count: usize) -> Vec<(u32, f32)> {
    let mut all: Vec<(u32, f32)> = (0..).zip(scores.iter().copied()).collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    all.truncate(count);
    all
}

fn ids(tokens: &[TokenOutput]) -> Vec<u32> {
    tokens.iter().map(|token| token.id).collect()
}

fn search(seed: u64, options: BeamOptions, max_tokens: usize) -> (Vec<Hypothesis>, usize) {
    let mut search = BeamSearch::new(options, vec![EOS], max_tokens);
    let mut steps = 0;
    loop {
        let top = |beam: &Beam| best_first(&next(seed, &ids(&beam.tokens)), search.candidates());
        let all: Vec<_> = search.running().iter().map(top).collect();
        assert!(search.running().len() <= options.width);
        steps += 1;
        if !search.step(&all, 0) {
            return (search.into_finished(), steps);
        }
    }
}

/// All texts of at most `max_tokens` tokens, with their log-probabilities.
fn all_texts(
    seed: u64,
    text: &mut Vec<u32>,
    logprob: f64,
    max_tokens: usize,
    found: &mut Vec<(Vec<u32>, f64)>,
) {
    for (id, score) in (0..).zip(next(seed, text)) {
        text.push(id);
        let logprob = logprob + f64::from(score);
        if id == EOS || text.len() == max_tokens {
            found.push((text.clone(), logprob));
        } else {
            all_texts(seed, text, logprob, max_tokens, found);
        }
        text.pop();
    }
}

fn options(width: usize, length_penalty: f64, early_stopping: EarlyStopping) -> BeamOptions {
    BeamOptions {
        width,
        length_penalty,
        early_stopping,
    }
}

/// A beam as wide as there are texts finds all of them, in the order of their scores.
#[test]
fn a_beam_that_is_wide_enough_finds_the_best_of_all_texts() {
    for seed in 0..30 {
        for penalty in [0.0, 1.0, 2.0, -1.0] {
            let mut all = Vec::new();
            all_texts(seed, &mut Vec::new(), 0.0, 4, &mut all);
            let score =
                |(text, logprob): &(Vec<u32>, f64)| logprob / (text.len() as f64).powf(penalty);
            all.sort_by(|a, b| score(b).total_cmp(&score(a)));
            // There are 4^3 texts of three tokens that go on, each with five continuations.
            let (found, _) = search(seed, options(400, penalty, EarlyStopping::Never), 4);
            assert_eq!(found.len(), all.len());
            for (found, want) in found.iter().zip(&all) {
                assert!(
                    (found.score - score(want)).abs() < 1e-5,
                    "{seed}, {penalty}"
                );
                let token = *want.0.last().unwrap();
                let ended = token == EOS;
                assert_eq!(found.finish == FinishReason::Stop { token }, ended);
            }
            assert_eq!(ids(&found[0].tokens), all[0].0);
        }
    }
}

/// Beams as a loop over whole vocabularies finds them.
#[test]
fn narrow_beams_are_those_of_a_search_over_the_whole_vocabulary() {
    for seed in 0..50 {
        for width in [1, 2, 3] {
            let max_tokens = 6;
            let mut running = vec![(Vec::new(), 0.0)];
            let mut finished: Vec<(f64, Vec<u32>)> = Vec::new();
            for len in 1..=max_tokens {
                let mut all: Vec<(Vec<u32>, f64)> = Vec::new();
                for (text, logprob) in &running {
                    for (id, score) in (0..).zip(next(seed, text)) {
                        all.push(([&text[..], &[id]].concat(), logprob + f64::from(score)));
                    }
                }
                all.sort_by(|a, b| b.1.total_cmp(&a.1));
                let ends = |text: &[u32]| len == max_tokens || text.ends_with(&[EOS]);
                for (text, logprob) in all.iter().take(width).filter(|(text, _)| ends(text)) {
                    finished.push((logprob / len as f64, text.clone()));
                }
                all.retain(|(text, _)| !text.ends_with(&[EOS]));
                all.truncate(width);
                running = all;
            }
            finished.sort_by(|a, b| b.0.total_cmp(&a.0));
            finished.truncate(width);
            // With this penalty nothing is lost by going on: compare the whole list.
            let (found, steps) =
                search(seed, options(width, 1.0, EarlyStopping::Never), max_tokens);
            let found: Vec<Vec<u32>> = found.iter().map(|text| ids(&text.tokens)).collect();
            let want: Vec<Vec<u32>> = finished.into_iter().map(|(_, text)| text).collect();
            assert_eq!(found, want, "{seed}, {width}");
            assert!(steps <= max_tokens);
        }
    }
}

#[test]
fn early_stopping_ends_a_search_sooner() {
    let steps = |early| -> usize {
        (0..40)
            .map(|seed| search(seed, options(2, 1.0, early), 12).1)
            .sum()
    };
    let [yes, no, never] = [EarlyStopping::Yes, EarlyStopping::No, EarlyStopping::Never].map(steps);
    assert!(yes < no && no < never, "{yes}, {no}, {never}");
}
