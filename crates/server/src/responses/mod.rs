//! OpenAI's Responses API, without state: a request becomes a chat, and its reply a list of items.

mod events;
mod input;
mod options;
mod request;
mod tools;

pub(super) use events::{FailedEvent, ResponseObject, has_route};
pub(super) use options::FlatChoice;
pub(super) use request::ResponseFields;
