//! Routes of llama.cpp's server: its properties, rendered chats, and infilling for editors.

mod infill;
mod props;
mod reply;
mod settings;

pub(super) use infill::{AppliedTemplate, InfillFields};
pub(super) use props::{Props, props};
pub(super) use reply::InfillReply;
