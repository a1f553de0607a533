//! Thoughts that end after so many tokens, whatever is drafted.

use super::*;
use crate::sampling::{Mask, Rng, Sampler, SamplingParams, choose, distribution, guess, mix};

/// A token for each byte, and behind them some longer ones.
struct Bytes(Vec<Vec<u8>>);

const LONG: [&str; 5] = ["<t>", "</t>", "</", ">\n", "é"];

impl Bytes {
    fn new() -> Arc<Self> {
        let bytes = (0..=255).map(|byte: u8| vec![byte]);
        Arc::new(Self(bytes.chain(LONG.map(Vec::from)).collect()))
    }
}

impl TokenBytes for Bytes {
    fn bytes(&self, id: u32) -> &[u8] {
        self.0.get(id as usize).map_or(&[], |bytes| bytes)
    }
}

const END: u32 = 257;

fn limit(closing: &[u32], max_tokens: usize, is_open: bool) -> ThoughtLimit {
    let marks = ThoughtMarks::new(&["<t>"], &["</t>"], closing.to_vec(), Bytes::new());
    ThoughtLimit {
        marks: Arc::new(marks.expect("it writes the end")),
        max_tokens,
        is_open,
    }
}

fn sampler(limit: ThoughtLimit) -> Sampler {
    let params = SamplingParams {
        thought: Some(limit),
        ..Default::default()
    };
    Sampler::new(params, &[1, 2])
}

/// The token that must follow a text of one token a byte.
fn after(limit: ThoughtLimit, text: &str) -> Option<u32> {
    let mut sampler = sampler(limit);
    text.bytes().for_each(|byte| sampler.push(byte.into()));
    sampler.forced_token()
}

/// Any mark opens and any closes; the first is written. Space before them may be long.
#[test]
fn several_marks_are_known() {
    let marks = ThoughtMarks::new(&["<t>", "So:"], &["</t>", "Now:"], vec![END], Bytes::new());
    let limit = ThoughtLimit {
        marks: Arc::new(marks.expect("it writes the end")),
        max_tokens: 2,
        is_open: false,
    };
    let space = " \u{3000}".repeat(50);
    for (text, closes) in [
        ("So:ab", true),
        ("So:aNow:bcd", false),
        ("<t>ab", true),
        ("Sab", false),
    ] {
        assert_eq!(after(limit.clone(), text), closes.then_some(END), "{text}");
        let text = format!("{space}{text}");
        assert_eq!(after(limit.clone(), &text), closes.then_some(END), "{text}");
    }
}

#[test]
fn a_thought_is_closed_after_its_tokens() {
    for (max_tokens, is_open, text, closes) in [
        (0, true, "", true),
        (2, true, "a", false),
        (2, true, "ab", true),
        // The model opens it itself, after space, and what comes before does not count.
        (0, false, "", false),
        (0, false, " \n<t", false),
        (0, false, " \n<t>", true),
        (2, false, "\n<t>a", false),
        (2, false, "\n<t>ab", true),
        // There is none.
        (0, false, "a<t>", false),
        (0, false, "<a<t>", false),
        // It is over.
        (4, true, "</t>", false),
        (9, true, "ab</t>cdefghi", false),
        (9, false, "<t>ab</t>cdefg<t>", false),
        // The prompt has opened it: what follows counts from the first token on.
        (3, true, "<t>", true),
        // No character is cut: é has two bytes.
        (1, true, "é", true),
    ] {
        let found = after(limit(&[END], max_tokens, is_open), text);
        assert_eq!(found, closes.then_some(END), "{max_tokens} {text:?}");
    }
}

#[test]
fn a_character_is_not_cut_in_two() {
    let mut sampler = sampler(limit(&[END], 1, true));
    sampler.push(0xC3);
    assert_eq!(sampler.forced_token(), None);
    sampler.push(0xA9);
    assert_eq!(sampler.forced_token(), Some(END));
    // Nor does a text without an end of a character go on for ever.
    sampler.truncate(0);
    (0..4).for_each(|_| sampler.push(0xF0));
    assert_eq!(sampler.forced_token(), Some(END));
    for (text, within) in [
        (&b"a"[..], false),
        (b"", false),
        ("é".as_bytes(), false),
        (&"€".as_bytes()[..2], true),
        (&"😀".as_bytes()[..3], true),
        (b"\x80\x80\x80", false),
    ] {
        assert_eq!(is_within_char(text), within, "{text:?}");
    }
}

#[test]
fn a_mark_of_several_tokens_is_written_to_its_end() {
    let tokens = [258, u32::from(b't'), 259];
    let mut sampler = sampler(limit(&tokens, 2, true));
    sampler.push(u32::from(b'x'));
    // The model begins it itself.
    sampler.push(tokens[0]);
    for id in &tokens[1..] {
        assert_eq!(sampler.forced(9)[0], *id);
        assert_eq!(sampler.forced_token(), Some(*id));
        sampler.push(*id);
    }
    assert_eq!(sampler.forced_token(), None);
    assert!(!sampler.depends_on_tokens());
    sampler.truncate(1);
    assert!(sampler.depends_on_tokens());
    sampler.push(u32::from(b'y'));
    assert_eq!(sampler.forced(9), tokens);
    assert_eq!(sampler.forced(2), tokens[..2]);
    assert_eq!(sampler.output_len(), 2);
    assert!(ThoughtMarks::new(&["<t>"], &["</t>"], vec![258], Bytes::new()).is_none());
}

/// A forced token is the only one that can be chosen, although other rules forbid it.
#[test]
fn nothing_else_can_be_chosen() {
    let logits: Vec<f32> = (0..300).map(|id| (mix(id) % 9) as f32).collect();
    for temperature in [0.0, 1e-4, 0.7, 2.0] {
        let params = SamplingParams {
            temperature,
            top_p: 0.9,
            repetition_penalty: 1.3,
            logit_bias: vec![(END, -100.0), (3, 100.0)],
            bad_words: Arc::new([vec![END]]),
            allowed: Some(Arc::new(Mask::of(&[3, 7]))),
            thought: Some(limit(&[END], 1, true)),
            ..Default::default()
        };
        let mut sampler = Sampler::new(params, &[1, END]);
        sampler.push(7);
        for key in 0..20 {
            assert_eq!(choose(&logits, &sampler, key), Ok(END));
        }
        let dist = distribution(&logits, &sampler).expect("a token");
        assert_eq!(dist.prob(END), 1.0);
        let guesses = guess(&logits, &sampler, 3, 2).expect("a token");
        assert_eq!((guesses[0].token, guesses[0].prob), (END, 1.0));
        // A draft model may not have it.
        assert!(guess(&logits[..40], &sampler, 3, 2).is_ok());
    }
}

/// The logits after `output`, of which the model likes some more than others.
fn logits(output: &[u32]) -> Vec<f32> {
    let likely = [256, 258, 259, 260, 60, 97, 116, 195];
    let after = output.iter().rev().take(3);
    let seed = after.fold(7, |seed, &id| mix(seed ^ u64::from(id)));
    let logit = |id: u32| {
        let noise = (mix(seed ^ mix(id.into())) >> 40) as f32 / (1 << 24) as f32;
        8.0 * noise + if likely.contains(&id) { 4.0 } else { 0.0 }
    };
    (0..261).map(logit).collect()
}

/// Drafts, right or wrong, change no text: what they force is forced without them, and no sooner.
#[test]
fn a_draft_changes_no_text() {
    const LEN: usize = 40;
    let closings: [&[u32]; 2] = [&[END], &[258, u32::from(b't'), 259]];
    let mut closed = 0;
    for case in 0..300_u64 {
        let roll = mix(case);
        let limit = limit(
            closings[case as usize % 2],
            (roll >> 8) as usize % 20,
            !roll.is_multiple_of(4),
        );
        let params = SamplingParams {
            temperature: [0.0, 1.0][(roll >> 20) as usize % 2],
            thought: Some(limit.clone()),
            ..Default::default()
        };
        let draw = |sampler: &Sampler, output: &[u32]| {
            let key = Rng::at(case, output.len());
            choose(&logits(output), sampler, key.key(0)).expect("a token")
        };
        let mut sampler = Sampler::new(params.clone(), &[1]);
        let mut plain: Vec<u32> = Vec::new();
        while plain.len() < LEN {
            let token = draw(&sampler, &plain);
            sampler.push(token);
            plain.push(token);
        }
        let mut sampler = Sampler::new(params, &[1]);
        let mut output: Vec<u32> = Vec::new();
        while output.len() < LEN {
            let mut draft = sampler.forced(4);
            while draft.len() < 4 {
                let right = plain.get(output.len() + draft.len()).copied();
                let roll = mix(case << 32 | (output.len() * 8 + draft.len()) as u64);
                let wrong = if roll.is_multiple_of(2) { END } else { 97 };
                draft.push(right.filter(|_| !roll.is_multiple_of(3)).unwrap_or(wrong));
            }
            let (before, mut path) = (output.len(), output.clone());
            let next = loop {
                let next = draw(&sampler, &path);
                if draft.get(path.len() - before) != Some(&next) {
                    break next;
                }
                sampler.push(next);
                path.push(next);
            };
            sampler.truncate(before);
            path.push(next);
            path[before..].iter().for_each(|&token| sampler.push(token));
            sampler.commit();
            output = path;
        }
        assert_eq!(output[..LEN], plain, "{limit:?}");
        let (start, len) = (limit.max_tokens, limit.marks.closing().len());
        if limit.is_open {
            closed += usize::from(plain[start..start + len] == *limit.marks.closing());
            // A character may end first.
            let text = limit.marks.text(&plain[..start + MAX_CHAR_TOKENS + len]);
            assert!(contains(&text, b"</t>"), "{limit:?}");
        }
    }
    assert!(closed > 100, "{closed} were closed");
}

/// After any pushes and truncations, the state equals one that got only the remaining tokens.
#[test]
fn truncation_undoes_pushes() {
    let marks = [b'<', b't', b'>', b'/', b' ', b'a'].map(u32::from);
    let alphabet = [&marks[..], &[256, END, 258, 259, 260, 0xC3, 0xA9]].concat();
    let closings: [&[u32]; 2] = [&[END], &[258, u32::from(b't'), 259]];
    let (mut forced, mut ended) = (0, 0);
    for case in 0..400_u64 {
        let roll = mix(case);
        let closing = closings[case as usize % 2];
        let limit = limit(closing, (roll >> 8) as usize % 6, roll.is_multiple_of(3));
        let mut text = sampler(limit.clone());
        let mut output: Vec<u32> = Vec::new();
        for step in 0..60 {
            let roll = mix(case << 32 | step);
            if roll.is_multiple_of(4) {
                let len = output.len() - output.len().min((roll >> 8) as usize % 5);
                output.truncate(len);
                text.truncate(len);
            } else {
                let other = alphabet[(roll >> 8) as usize % alphabet.len()];
                // A draft may go against what is forced.
                let token = text.forced_token().filter(|_| !roll.is_multiple_of(5));
                output.push(token.unwrap_or(other));
                text.push(token.unwrap_or(other));
            }
            let mut fresh = sampler(limit.clone());
            output.iter().for_each(|&token| fresh.push(token));
            assert_eq!(text.forced_token(), fresh.forced_token(), "{output:?}");
            assert_eq!(text.depends_on_tokens(), fresh.depends_on_tokens());
            forced += usize::from(text.forced_token().is_some());
            ended += usize::from(text.forced(1).is_empty());
        }
    }
    assert!(forced > 1000 && ended > 1000, "{forced} {ended}");
}
