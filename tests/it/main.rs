//! Integration tests, one module a promise or a surface. They are one binary, because linking is
//! what a change waits for. What needs a process of its own is beside this folder: `hub.rs` sets
//! environment variables, `cuda*.rs` need the feature `cuda` or a C++ compiler.

#[path = "../common/mod.rs"]
mod common;

mod advisories;
mod architectures;
mod architectures_gguf;
mod assistants;
mod attention;
mod auto_draft;
mod batch;
mod beams;
mod bench;
mod chat;
mod check;
mod check_gpu;
mod check_hub;
mod checkpoint;
mod cli;
mod config_defaults;
mod convert;
mod corpus;
mod corrupt_files;
mod corrupt_heads;
#[cfg(feature = "embedded-model")]
mod demo;
#[cfg(feature = "train")]
mod distill;
#[cfg(feature = "train")]
mod distill_head;
#[cfg(feature = "train")]
mod distill_init;
#[cfg(feature = "train")]
mod distill_resume;
mod draft_vocab;
mod drafter_panics;
mod eagle;
mod eagle_head;
mod embedding_gemma;
mod embeddings;
mod engine;
mod engine_end;
mod engine_faults;
mod engine_limits;
mod engine_texts;
mod ernie_moe;
#[cfg(feature = "embedded-model")]
mod examples;
mod experts;
mod experts_cost;
mod flag_limits;
mod gemma3;
mod generate;
mod generation_config;
mod gguf;
mod glm_moe;
mod gpt_oss;
mod grammar_bounds;
mod head_fixtures;
mod head_probabilities;
mod head_refusals;
mod http;
mod http_adapters;
mod http_agents;
mod http_browsers;
mod http_channels;
mod http_connections;
mod http_custom_tools;
mod http_drafts;
mod http_embeddings;
mod http_encoding;
mod http_grammar;
mod http_info;
mod http_literal;
mod http_llama;
mod http_manners;
mod http_memory;
mod http_messages;
mod http_messages_errors;
mod http_ollama;
mod http_ollama_errors;
mod http_ollama_models;
mod http_openapi;
mod http_page;
mod http_parameters;
mod http_prefill;
mod http_refusals;
mod http_required;
mod http_rerank;
mod http_responses;
mod http_responses_errors;
mod http_speculation;
mod http_stops;
mod http_stored;
mod http_templates;
mod http_tls;
mod http_tools;
mod http_tools_errors;
mod hub_downloads;
mod interruptions;
mod kv;
mod kv_cache_dtype;
mod latent;
#[cfg(all(feature = "embedded-model", feature = "train"))]
mod learn;
mod logs;
mod lora;
mod lora_refusals;
mod lossy;
mod mamba;
mod medusa;
mod model;
mod model_config;
mod mtp;
mod packed;
mod packed_refusals;
mod pair;
mod parallel;
mod parallel_head;
mod paths;
mod prefix;
mod prefix_disk;
mod published_configs;
mod quantize;
mod qwen;
mod recorded;
mod renamed_models;
mod reports;
#[cfg(feature = "embedded-model")]
mod router;
#[cfg(feature = "embedded-model")]
mod router_adapters;
mod rows;
mod schedules;
mod self_draft;
#[cfg(feature = "embedded-model")]
mod shutdown;
mod smollm2;
mod synthetic;
mod taps;
mod thinking;
mod translate;
mod trees;
