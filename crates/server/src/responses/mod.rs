//! OpenAI's Responses API, without state: a request becomes a chat, and its reply a list of items.

mod events;
mod input;
mod object;
mod options;
mod request;
mod tools;

pub(super) use events::{FailedEvent, has_route};
pub(super) use object::ResponseObject;
pub(super) use options::FlatChoice;
pub(super) use request::ResponseFields;
