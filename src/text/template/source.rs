//! What is checked of a template's source before it is parsed: the library parses and compiles chains of
//! operators, of filters and of `elif` by recursion, and multiplies constants.

use crate::error::{Error, Result};
use minijinja::machinery::{Token, tokenize};
use minijinja::syntax::SyntaxConfig;

/// Bytes of a template. The largest of known models have 20,000.
const MAX_BYTES: usize = 256 << 10;
/// Tokens between `{{` and `}}`, or `{%` and `%}`.
const MAX_TOKENS: usize = 2_000;
/// Bytes of a line, and lines.
const MAX_LINE: usize = 60_000;
const MAX_ELIFS: usize = 500;
/// A constant times this is still small.
const MAX_FACTOR: u64 = 1_000;

/// # Errors
/// `Setup`, if the source is too large or has an expression that is too long. Syntax errors are left to
/// the parser.
pub(super) fn check(source: &str, syntax: &SyntaxConfig) -> Result<()> {
    let refused = |what: String| Err(Error::setup(format!("the chat template {what}")));
    if source.len() > MAX_BYTES {
        let kib = MAX_BYTES >> 10;
        return refused(format!(
            "has {} bytes; {kib} KiB are accepted",
            source.len()
        ));
    }
    // The library counts both in 16 bits.
    let longest = source.lines().map(str::len).max().unwrap_or(0);
    if longest.max(source.lines().count()) > MAX_LINE {
        return refused(format!("has more than {MAX_LINE} lines or bytes in a line"));
    }
    let (mut in_tag, mut elifs, mut products) = (0, 0, 0);
    let mut tokens = Vec::new();
    for token in tokenize(source, false, syntax.clone()).map_while(|token| token.ok()) {
        let (token, span) = token;
        in_tag += 1;
        match token {
            Token::TemplateData(_) | Token::VariableStart | Token::BlockStart => in_tag = 0,
            Token::Ident("elif") => elifs += 1,
            _ => {}
        }
        if in_tag > MAX_TOKENS {
            let line = span.start_line;
            return refused(format!(
                "has more than {MAX_TOKENS} tokens in one tag, in line {line}"
            ));
        }
        tokens.push(token);
    }
    if elifs > MAX_ELIFS {
        return refused(format!("has more than {MAX_ELIFS} times `elif`"));
    }
    for around in tokens.windows(3) {
        let [left, Token::Mul | Token::Pow, right] = around else {
            continue;
        };
        products += match (left, right) {
            (Token::Ident(_), _) | (_, Token::Ident(_)) => 0,
            (Token::Int(factor), _) | (_, Token::Int(factor)) if *factor <= MAX_FACTOR => 1,
            _ => 2,
        };
    }
    match products {
        0 | 1 => Ok(()),
        _ => refused(format!(
            "multiplies constants more than once, or with more than {MAX_FACTOR}"
        )),
    }
}
