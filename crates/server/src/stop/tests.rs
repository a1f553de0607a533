use super::*;
use proptest::prelude::*;

fn stops(texts: &[&str]) -> Stops {
    Stops::new(texts.iter().map(|&text| text.to_owned()))
}

#[test]
fn the_stop_string_that_is_complete_first_wins() {
    for (texts, text, shown, stop) in [
        (&["bcd", "c"][..], "abcde", "ab", "c"),
        (&["c", "bc"], "abcde", "a", "bc"),
        (&["aab"], "aaab", "a", "aab"),
        (&["abac", "ba"], "abab", "a", "ba"),
    ] {
        let stops = stops(texts);
        let found = StopMatcher::default().push(&stops, text.into(), true);
        assert_eq!(found, (shown.into(), Some(stop)));
    }
}

#[test]
fn a_stop_string_may_be_a_part_of_the_text() {
    let stops = stops(&["bcd"]).shown(true);
    let mut matcher = StopMatcher::default();
    assert_eq!(matcher.push(&stops, "abc".into(), true), ("a".into(), None));
    let found = matcher.push(&stops, "de".into(), true);
    assert_eq!(found, ("bcd".into(), Some("bcd")));
}

#[test]
fn an_ignored_match_is_text_and_may_begin_another() {
    let stops = stops(&["aaa"]);
    let mut matcher = StopMatcher::default();
    assert_eq!(
        matcher.push(&stops, "aaa".into(), false),
        ("a".into(), None)
    );
    assert_eq!(
        matcher.push(&stops, "a".into(), true),
        (String::new(), Some("aaa"))
    );
}

#[test]
fn the_cost_of_a_piece_does_not_grow_with_the_stop_strings() {
    let stops = Stops::new((0..4).map(|i| format!("{}{i}", "a".repeat(450_000))));
    let mut matcher = StopMatcher::default();
    let started = std::time::Instant::now();
    for _ in 0..20_000 {
        let shown = matcher.push(&stops, "aab".into(), true);
        assert_eq!(shown, ("aab".into(), None));
    }
    // Takes milliseconds; preparing the search again for every piece would take minutes.
    assert!(started.elapsed() < std::time::Duration::from_secs(60));
}

/// The length of the longest suffix of `text` that is the beginning of a stop string.
fn begun(text: &str, texts: &[String]) -> usize {
    let ends = texts.iter().flat_map(|stop| {
        let begins = stop.char_indices().map(|(at, _)| at);
        begins.filter(|&at| text.ends_with(&stop[..at]))
    });
    ends.max().unwrap_or(0)
}

proptest! {
    #[test]
    fn pieces_change_nothing_and_no_beginning_is_shown(
        text in "[abéèc]{0,40}",
        texts in prop::collection::vec("[abéè]{1,6}", 1..5),
        sizes in prop::collection::vec(0usize..5, 1..6),
    ) {
        // The reference: the first end of a stop string, and the longest one that ends there.
        let ends = texts.iter().filter_map(|stop| {
            let at = text.find(stop.as_str())?;
            Some((at + stop.len(), at, stop.as_str()))
        });
        let first = ends.min();

        let stops = Stops::new(texts.clone());
        let mut matcher = StopMatcher::default();
        let (mut shown, mut seen, mut found) = (String::new(), String::new(), None);
        let (mut rest, mut sizes) = (text.chars(), sizes.iter().chain([&1]).cycle());
        while found.is_none() && seen.len() < text.len() {
            let piece: String = rest.by_ref().take(*sizes.next().expect("cycles")).collect();
            seen.push_str(&piece);
            let (new, stop) = matcher.push(&stops, piece, true);
            shown.push_str(&new);
            found = stop;
            if found.is_none() {
                prop_assert_eq!(shown.len(), seen.len() - begun(&seen, &texts));
            }
        }
        if found.is_none() {
            shown.push_str(&matcher.finish());
        }
        prop_assert_eq!(found, first.map(|(_, _, stop)| stop));
        prop_assert_eq!(shown.as_str(), first.map_or(text.as_str(), |(_, at, _)| &text[..at]));
    }
}
