//! OpenAI's Responses API: a request becomes a chat, and its reply a list of items, which may be stored.

mod events;
mod input;
mod object;
mod options;
mod request;
mod routes;
mod storing;
mod tools;

pub(super) use events::{FailedEvent, has_route};
pub(super) use object::ResponseObject;
pub(super) use options::FlatChoice;
pub(super) use request::{InputTokenCount, ResponseFields};
pub(super) use routes::{DeletedResponse, InputItemList, delete, input_items, stored};
