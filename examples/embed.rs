//! An engine within another program: `cargo run --release --example embed -- MODEL PROMPT`

use foretoken::engine::Request;
use foretoken::error::Result;
use foretoken::sampling::SamplingParams;
use foretoken::{Drafting, Foretoken};

/// What `model` writes after `prompt`, and how many of the draft tokens were accepted.
pub fn complete(model: &str, prompt: &str) -> Result<(String, usize)> {
    let running = Foretoken::load(model).drafter(Drafting::Auto).start()?;
    let text = running.text()?;
    let request = Request {
        prompt: text.encode(prompt, true)?,
        max_tokens: Some(48),
        params: SamplingParams::at(0.0),
        ..Request::default()
    };
    let answer = running.engine().submit(request)?.blocking_collect()?;
    Ok((text.decode(&answer.ids(), true), answer.spec.accepted))
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let model = args.next().unwrap_or("foretoken-demo".into());
    let prompt = args.next().unwrap_or("Once upon a time".into());
    let (text, accepted) = complete(&model, &prompt)?;
    println!("{prompt}{text}\n\n{accepted} tokens were accepted from drafts");
    Ok(())
}
