//! Rewrites a template's source where the library does not read what Hugging Face's Jinja reads.
//!
//! The library's own lexer finds the places, so that nothing in raw blocks, comments or texts is touched.

use minijinja::machinery::{Span, Token, tokenize};
use minijinja::syntax::SyntaxConfig;
use std::borrow::Cow;

/// The filter that stands for the operator `%`, which has texts on its left side, too.
pub(super) const PERCENT: &str = "__percent__";

/// A template in the library's language:
/// - Lines end with `\n`, as Jinja reads them.
/// - `{% generation %}`, which marks for training what the assistant says, becomes a scope of its own.
/// - `a % b` becomes `(a)|__percent__(b)`.
///
/// A template that cannot be read stays as it is: the compiler tells why.
pub(super) fn rewrite(source: &str, syntax: &SyntaxConfig) -> String {
    let source = if source.contains('\r') {
        Cow::Owned(source.replace("\r\n", "\n").replace('\r', "\n"))
    } else {
        Cow::Borrowed(source)
    };
    let tokens: Result<Vec<_>, _> = tokenize(&source, false, syntax.clone()).collect();
    match tokens {
        Ok(tokens) => Rewriter::new(&tokens).edit(&source),
        Err(_) => source.into_owned(),
    }
}

/// A replacement: its place in the source, the number of bytes that are replaced, and the new text.
type Edit = (usize, usize, &'static str);

struct Rewriter<'t> {
    tokens: &'t [(Token<'t>, Span)],
    edits: Vec<Edit>,
}

/// Within brackets, or within a statement or a variable.
#[derive(Default)]
struct Level {
    /// Where the operands of the current product begin.
    product: Option<usize>,
    /// Whether the right side of a `%` is open.
    is_open: bool,
}

impl<'t> Rewriter<'t> {
    fn new(tokens: &'t [(Token<'t>, Span)]) -> Self {
        Self {
            tokens,
            edits: Vec::new(),
        }
    }

    fn edit(mut self, source: &str) -> String {
        self.generations();
        self.remainders();
        // The sort is stable, so edits at the same place stay in order.
        self.edits.sort_by_key(|(at, ..)| *at);
        let (mut edited, mut read) = (String::with_capacity(source.len()), 0);
        for (at, len, text) in self.edits {
            edited.push_str(&source[read..at]);
            edited.push_str(text);
            read = at + len;
        }
        edited + &source[read..]
    }

    fn generations(&mut self) {
        for window in self.tokens.windows(3) {
            let [
                (Token::BlockStart, _),
                (Token::Ident(name), span),
                (Token::BlockEnd, _),
            ] = window
            else {
                continue;
            };
            let scope = match *name {
                "generation" => "with",
                "endgeneration" => "endwith",
                _ => continue,
            };
            self.edits.push((start(span), name.len(), scope));
        }
    }

    fn remainders(&mut self) {
        let mut levels = vec![Level::default()];
        for i in 0..self.tokens.len() {
            let (token, span) = &self.tokens[i];
            let Some(level) = levels.last_mut() else {
                return;
            };
            match token {
                Token::Mod if level.product.is_some() && !self.begins_operand(i) => {
                    self.close(i, level);
                    let begin = level.product.unwrap_or_default();
                    self.edits.push((begin, 0, "("));
                    self.edits.push((start(span), 1, ")|__percent__("));
                    level.is_open = true;
                }
                Token::Mul | Token::Div | Token::FloorDiv => self.close(i, level),
                _ if self.separates(i) => {
                    self.close(i, level);
                    level.product = None;
                }
                Token::ParenClose | Token::BracketClose | Token::BraceClose => {
                    self.close(i, level);
                    // Unbalanced ones are an error, which the compiler tells.
                    if levels.len() > 1 {
                        levels.pop();
                    }
                }
                _ => {
                    level.product.get_or_insert(start(span));
                    if matches!(
                        token,
                        Token::ParenOpen | Token::BracketOpen | Token::BraceOpen
                    ) {
                        levels.push(Level::default());
                    }
                }
            }
        }
    }

    /// Ends the right side of a `%` before token `i`.
    fn close(&mut self, i: usize, level: &mut Level) {
        if std::mem::take(&mut level.is_open) {
            let (_, before) = &self.tokens[i - 1];
            self.edits.push((before.end_offset as usize, 0, ")"));
        }
    }

    /// The token before `i`.
    fn before(&self, i: usize) -> Option<&Token<'t>> {
        let (token, _) = self.tokens.get(i.checked_sub(1)?)?;
        Some(token)
    }

    /// Whether an operand begins at token `i`, so that a sign there is one.
    fn begins_operand(&self, i: usize) -> bool {
        match self.before(i) {
            None => true,
            Some(Token::Ident(_)) => self.is_keyword(i - 1),
            Some(token) => !matches!(
                token,
                Token::Str(_)
                    | Token::String(_)
                    | Token::Int(_)
                    | Token::Int128(_)
                    | Token::Float(_)
                    | Token::ParenClose
                    | Token::BracketClose
                    | Token::BraceClose
            ),
        }
    }

    /// Whether token `i` binds operands less closely than `%` does, or begins or ends an expression.
    fn separates(&self, i: usize) -> bool {
        match &self.tokens[i].0 {
            Token::Plus | Token::Minus => !self.begins_operand(i),
            Token::Ident(_) => self.is_keyword(i),
            Token::Tilde
            | Token::Comma
            | Token::Colon
            | Token::Assign
            | Token::Eq
            | Token::Ne
            | Token::Gt
            | Token::Gte
            | Token::Lt
            | Token::Lte
            | Token::TemplateData(_)
            | Token::VariableStart
            | Token::VariableEnd
            | Token::BlockStart
            | Token::BlockEnd => true,
            _ => false,
        }
    }

    /// Whether the name at token `i` is that of a statement or an operator.
    fn is_keyword(&self, i: usize) -> bool {
        let (Token::Ident(name), before) = (&self.tokens[i].0, self.before(i)) else {
            return false;
        };
        let is_test = |i: usize| matches!(self.before(i), Some(Token::Ident("is")));
        match before {
            Some(Token::BlockStart) => true,
            Some(Token::Dot | Token::Pipe) => false,
            Some(Token::Ident("is")) => false,
            Some(Token::Ident("not")) if is_test(i - 1) => false,
            _ => matches!(*name, "and" | "or" | "not" | "in" | "if" | "else"),
        }
    }
}

fn start(span: &Span) -> usize {
    span.start_offset as usize
}
