//! Anthropic's Messages API: a request becomes a chat, and its reply a message of content blocks.

mod client_tools;
mod document;
mod error;
mod events;
mod input;
mod request;

pub(super) use error::{Failure, MessageError, body as error_body, has_route};
pub(super) use events::Message;
pub(super) use request::{MessageFields, TokenCount};
