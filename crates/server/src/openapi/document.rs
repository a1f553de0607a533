//! The objects of an OpenAPI document.

use schemars::Schema;
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

#[derive(Serialize)]
pub(crate) struct OpenApi {
    pub openapi: &'static str,
    pub info: Info,
    /// Any of them is enough.
    pub security: Vec<BTreeMap<&'static str, [(); 0]>>,
    /// By path and method.
    pub paths: BTreeMap<&'static str, BTreeMap<&'static str, Operation>>,
    pub components: Components,
}

#[derive(Serialize)]
pub(crate) struct Info {
    pub title: &'static str,
    pub version: &'static str,
    pub description: &'static str,
    pub license: License,
}

#[derive(Serialize)]
pub(crate) struct License {
    pub name: &'static str,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Components {
    pub schemas: Map<String, Value>,
    pub security_schemes: BTreeMap<&'static str, SecurityScheme>,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "camelCase")]
pub(crate) enum SecurityScheme {
    Http {
        scheme: &'static str,
    },
    ApiKey {
        #[serde(rename = "in")]
        place: &'static str,
        name: &'static str,
    },
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Operation {
    pub summary: &'static str,
    /// By status.
    pub responses: BTreeMap<u16, Response>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_body: Option<RequestBody>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parameters: Option<[Parameter; 1]>,
    /// An empty list = none is needed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub security: Option<[(); 0]>,
}

/// Schemas by media type.
pub(crate) type Content = BTreeMap<&'static str, Media>;

#[derive(Serialize)]
pub(crate) struct Media {
    pub schema: Schema,
}

#[derive(Serialize)]
pub(crate) struct RequestBody {
    pub required: bool,
    pub content: Content,
}

#[derive(Serialize)]
pub(crate) struct Response {
    pub description: &'static str,
    pub headers: BTreeMap<&'static str, Described>,
    pub content: Content,
}

/// A header, or what a parameter has in common with one.
#[derive(Clone, Serialize)]
pub(crate) struct Described {
    pub description: &'static str,
    pub schema: Schema,
    pub required: bool,
}

#[derive(Serialize)]
pub(crate) struct Parameter {
    pub name: &'static str,
    #[serde(rename = "in")]
    pub place: &'static str,
    #[serde(flatten)]
    pub about: Described,
}
