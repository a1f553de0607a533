//! An answer as a list of blocks, one after the other: what the model thinks, its text, and its calls. APIs
//! that show one answer in this way build the list from pieces, whether it is streamed or not.

use super::choice::{CallHead, Piece};

#[derive(Debug, Clone, PartialEq)]
pub(super) enum OutputBlock {
    Reasoning(String),
    Text(String),
    Call {
        head: CallHead,
        /// JSON text.
        arguments: String,
    },
}

/// What happens to one block. Only the last one changes, and after `End` none does.
#[derive(Debug, PartialEq)]
pub(super) enum Change {
    Begin,
    /// Adds to its text or arguments.
    Extend(String),
    End,
}

/// The blocks of an answer so far.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    list: Vec<OutputBlock>,
    /// Content that came after a call: it is the last block, because how the text is cut into pieces must not
    /// change the list.
    late: String,
}

impl Blocks {
    /// Adds a piece; an answer that ends without any block gets an empty text. Returns the changes, each with the index of its block.
    pub fn push(&mut self, piece: Piece) -> Vec<(usize, Change)> {
        let mut changes = Vec::new();
        self.extend(OutputBlock::Reasoning(piece.reasoning), &mut changes);
        self.extend(OutputBlock::Text(piece.text), &mut changes);
        for call in piece.calls {
            if let Some(head) = call.head {
                let arguments = String::new();
                self.begin(OutputBlock::Call { head, arguments }, &mut changes);
            }
            let head = CallHead::default();
            let arguments = call.arguments;
            self.extend(OutputBlock::Call { head, arguments }, &mut changes);
        }
        self.late.push_str(&piece.late);
        if piece.finish.is_some() {
            let late = std::mem::take(&mut self.late);
            self.extend(OutputBlock::Text(late), &mut changes);
            if self.list.is_empty() {
                self.begin(OutputBlock::Text(String::new()), &mut changes);
            }
            self.end(&mut changes);
        }
        changes
    }

    pub fn list(&self) -> &[OutputBlock] {
        &self.list
    }

    /// Whether it has calls.
    pub fn calls(&self) -> bool {
        let is_call = |block: &OutputBlock| matches!(block, OutputBlock::Call { .. });
        self.list.iter().any(is_call)
    }

    /// Adds the text of `more` to the last block, if it is of the same kind, or begins a block of its kind.
    fn extend(&mut self, mut more: OutputBlock, changes: &mut Vec<(usize, Change)>) {
        let text = std::mem::take(more.text());
        if text.is_empty() {
            return;
        }
        let kind = std::mem::discriminant(&more);
        let same = |last: &OutputBlock| std::mem::discriminant(last) == kind;
        if !self.list.last().is_some_and(same) {
            self.begin(more, changes);
        }
        if let Some(last) = self.list.last_mut() {
            last.text().push_str(&text);
            changes.push((self.list.len() - 1, Change::Extend(text)));
        }
    }

    fn begin(&mut self, block: OutputBlock, changes: &mut Vec<(usize, Change)>) {
        self.end(changes);
        self.list.push(block);
        changes.push((self.list.len() - 1, Change::Begin));
    }

    fn end(&mut self, changes: &mut Vec<(usize, Change)>) {
        if let Some(last) = self.list.len().checked_sub(1) {
            changes.push((last, Change::End));
        }
    }
}

impl OutputBlock {
    /// Its text, or its arguments.
    pub fn written(&self) -> &str {
        match self {
            Self::Reasoning(text) | Self::Text(text) => text,
            Self::Call { arguments, .. } => arguments,
        }
    }

    fn text(&mut self) -> &mut String {
        match self {
            Self::Reasoning(text) | Self::Text(text) => text,
            Self::Call { arguments, .. } => arguments,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::choice::{CallPiece, Finish, FinishKind};
    use super::*;

    fn call(index: usize, name: Option<&str>, arguments: &str) -> CallPiece {
        CallPiece {
            index,
            head: name.map(|name| CallHead {
                id: "id".into(),
                name: name.into(),
            }),
            arguments: arguments.into(),
        }
    }

    #[test]
    fn pieces_become_the_same_blocks_however_they_are_cut() {
        let finish = Finish {
            reason: FinishKind::Stop,
            stop: None,
        };
        let pieces = || {
            [
                Piece {
                    reasoning: "Hm".into(),
                    ..Piece::default()
                },
                Piece {
                    reasoning: ".".into(),
                    text: "Let".into(),
                    ..Piece::default()
                },
                Piece {
                    text: " me".into(),
                    calls: vec![
                        call(0, Some("a"), "{"),
                        call(0, None, "}"),
                        call(1, Some("b"), ""),
                    ],
                    late: "lat".into(),
                    ..Piece::default()
                },
                Piece {
                    calls: vec![call(1, None, "{}")],
                    late: "er".into(),
                    finish: Some(finish.clone()),
                    ..Piece::default()
                },
            ]
        };
        let mut whole = Piece::default();
        pieces().into_iter().for_each(|piece| whole.append(piece));
        let mut at_once = Blocks::default();
        at_once.push(whole);

        let mut blocks = Blocks::default();
        let changes: Vec<_> = pieces().into_iter().flat_map(|p| blocks.push(p)).collect();
        assert_eq!(blocks.list.len(), 5);
        assert_eq!(blocks.list[4], OutputBlock::Text("later".into()));
        let extend = |text: &str| Change::Extend(text.into());
        let expected = vec![
            (0, Change::Begin),
            (0, extend("Hm")),
            (0, extend(".")),
            (0, Change::End),
            (1, Change::Begin),
            (1, extend("Let")),
            (1, extend(" me")),
            (1, Change::End),
            (2, Change::Begin),
            (2, extend("{")),
            (2, extend("}")),
            (2, Change::End),
            (3, Change::Begin),
            (3, extend("{}")),
            (3, Change::End),
            (4, Change::Begin),
            (4, extend("later")),
            (4, Change::End),
        ];
        assert_eq!(changes, expected);
        let texts = |blocks: &mut Blocks| -> Vec<String> {
            blocks.list.iter_mut().map(|b| b.text().clone()).collect()
        };
        assert_eq!(texts(&mut at_once), texts(&mut blocks));
        assert!(blocks.calls());
    }
}
