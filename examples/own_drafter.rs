//! A drafter of one's own: it guesses that the text goes on as it did after the last token's previous place.
//! `cargo run --release --example own_drafter -- PROMPT`

use foretoken::Foretoken;
use foretoken::engine::Request;
use foretoken::error::Result;
use foretoken::sampling::SamplingParams;
use foretoken::spec::{Draft, DraftRequest, Drafter, SeqId, Source};

/// Tokens of the longest draft.
const DEPTH: usize = 4;

struct LastPlace;

impl Drafter for LastPlace {
    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<Vec<Draft>> {
        let drafts = requests.iter().map(|request| {
            let mut draft = Draft::default();
            let Some((last, before)) = request.tokens.split_last() else {
                return draft;
            };
            if let Some(place) = before.iter().rposition(|token| token == last) {
                let depth = DEPTH.min(request.length).min(request.nodes);
                let guesses = request.tokens[place + 1..].iter().take(depth);
                // The probability that a token and those before it stand decides whether it is worth a row.
                for (&token, stands) in guesses.zip([0.5, 0.25, 0.12, 0.06]) {
                    draft.push(token, stands, Source::Own);
                }
            }
            draft
        });
        Ok(drafts.collect())
    }

    fn forget(&mut self, _: SeqId) {}
}

/// What the demonstration model writes after `prompt` with this drafter, and how many of its tokens were accepted.
pub fn complete(prompt: &str) -> Result<(String, usize)> {
    let running = Foretoken::load("foretoken-demo")
        .own_drafter(LastPlace)
        // Verifies every guess, to show the drafter at work. Without this flag a guess is verified where that pays.
        .flags(["--spec-budget", "fixed"])
        .start()?;
    let text = running.text()?;
    let request = Request {
        prompt: text.encode(prompt, true)?,
        max_tokens: Some(64),
        params: SamplingParams::at(0.0),
        ..Request::default()
    };
    let answer = running.engine().submit(request)?.blocking_collect()?;
    Ok((text.decode(&answer.ids(), true), answer.spec.accepted))
}

fn main() -> Result<()> {
    let prompt = std::env::args().nth(1);
    let prompt = prompt.unwrap_or("One, two, three, one, two, three, one,".into());
    let (text, accepted) = complete(&prompt)?;
    println!("{prompt}{text}\n\n{accepted} tokens were accepted from drafts");
    Ok(())
}
