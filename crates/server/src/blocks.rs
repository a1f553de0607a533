//! An answer as a list of blocks, one after the other: what the model thinks, its text, and its calls. APIs
//! that show one answer in this way build the list from pieces, whether it is streamed or not.

use super::piece::{CallHead, Finish, MessagePart, Piece};

#[derive(Debug, Clone, PartialEq)]
pub(super) enum OutputBlock {
    Reasoning(String),
    Text(String),
    Call {
        head: CallHead,
        /// Whether it is a call of a custom tool.
        is_custom: bool,
        /// JSON text, or a custom tool's input.
        arguments: String,
    },
}

/// A change of one block. Only the last block changes, and after `End` it does not change any more.
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
    /// Whether the API joins blocks of a kind, so that the line between messages stays.
    joins: bool,
    /// How the answer ended.
    pub finish: Option<Finish>,
}

impl Blocks {
    /// The blocks of an API that joins those of a kind to one text.
    pub fn joined() -> Self {
        Self {
            joins: true,
            ..Self::default()
        }
    }

    /// Adds a piece; an answer that ends without any block gets an empty text. Returns the changes, each with the
    /// index of its block.
    pub fn push(&mut self, piece: Piece) -> Vec<(usize, Change)> {
        let mut changes = Vec::new();
        for part in piece.parts {
            let more = match part {
                MessagePart::Reasoning(text) => OutputBlock::Reasoning(text),
                MessagePart::Text(text) => OutputBlock::Text(text),
                MessagePart::Call(call) => {
                    let block = |head, arguments| OutputBlock::Call {
                        head,
                        is_custom: call.is_custom,
                        arguments,
                    };
                    if let Some(head) = call.head {
                        self.begin(block(head, String::new()), &mut changes);
                    }
                    block(CallHead::default(), call.arguments)
                }
            };
            self.extend(more, &mut changes);
        }
        if piece.finish.is_some() {
            if self.list.is_empty() {
                self.begin(OutputBlock::Text(String::new()), &mut changes);
            }
            self.end(&mut changes);
        }
        self.finish = piece.finish;
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
        let mut text = std::mem::take(more.text());
        if text.is_empty() {
            return;
        }
        let kind = std::mem::discriminant(&more);
        let same = |other: &OutputBlock| std::mem::discriminant(other) == kind;
        if !self.list.last().is_some_and(same) {
            // In a text, a line separates messages of a kind. A block is separate anyway.
            let is_message = !matches!(more, OutputBlock::Call { .. });
            if is_message && !self.joins && text.starts_with('\n') && self.list.iter().any(same) {
                text.remove(0);
            }
            self.begin(more, changes);
        }
        if text.is_empty() {
            return;
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
    /// Returns the block's text, or its arguments.
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
    use super::super::piece::{CallPiece, FinishKind};
    use super::*;

    fn text(text: &str) -> MessagePart {
        MessagePart::Text(text.into())
    }

    fn thought(text: &str) -> MessagePart {
        MessagePart::Reasoning(text.into())
    }

    fn call(index: usize, name: Option<&str>, arguments: &str) -> MessagePart {
        let head = |name: &str| CallHead {
            id: "id".into(),
            name: name.into(),
        };
        MessagePart::Call(CallPiece {
            index,
            head: name.map(head),
            is_custom: false,
            arguments: arguments.into(),
        })
    }

    #[test]
    fn pieces_become_the_same_blocks_however_they_are_cut() {
        let finish = Finish {
            reason: FinishKind::Stop,
            stop: None,
        };
        let pieces = || {
            let of = |parts: Vec<MessagePart>| Piece {
                parts,
                ..Piece::default()
            };
            let last = Piece {
                finish: Some(finish.clone()),
                ..of(vec![text("er"), thought("\nSo")])
            };
            [
                of(vec![thought("Hm")]),
                of(vec![thought("."), text("Let")]),
                of(vec![text(" me"), call(0, Some("a"), "{")]),
                of(vec![call(0, None, "}"), call(1, Some("b"), "")]),
                of(vec![call(1, None, "{}"), text("\n"), text("lat")]),
                last,
            ]
        };
        let mut whole = Piece::default();
        pieces().into_iter().for_each(|piece| whole.append(piece));
        let mut at_once = Blocks::default();
        at_once.push(whole);

        let mut blocks = Blocks::default();
        let changes: Vec<_> = pieces().into_iter().flat_map(|p| blocks.push(p)).collect();
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
            (4, extend("lat")),
            (4, extend("er")),
            (4, Change::End),
            (5, Change::Begin),
            (5, extend("So")),
            (5, Change::End),
        ];
        assert_eq!(changes, expected);
        assert_eq!(at_once.list, blocks.list);
        assert!(blocks.calls());
    }

    #[test]
    fn joined_blocks_keep_the_line_between_messages() {
        let parts = || {
            vec![
                thought("Hm"),
                text("Let me check."),
                thought("\nSo"),
                text("\nIt is 5"),
            ]
        };
        let written = |mut blocks: Blocks| {
            blocks.push(Piece {
                parts: parts(),
                ..Piece::default()
            });
            let written = blocks.list.iter().map(|block| block.written().to_owned());
            written.collect::<Vec<_>>()
        };
        assert_eq!(
            written(Blocks::joined()),
            ["Hm", "Let me check.", "\nSo", "\nIt is 5"]
        );
        assert_eq!(
            written(Blocks::default()),
            ["Hm", "Let me check.", "So", "It is 5"]
        );
    }
}
