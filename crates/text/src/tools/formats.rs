//! The formats of tool calls, a row each.

use super::syntax::{Body, Head, Keys, Named, Syntax, Tags};
use super::{ToolFormat, deepseek};
use crate::harmony;

fn has_any(source: &str, marks: &[&str]) -> bool {
    marks.iter().any(|mark| source.contains(mark))
}

fn has_all(source: &str, marks: &[&str]) -> bool {
    marks.iter().all(|mark| source.contains(mark))
}

/// Cohere's keys.
const COMMAND: Keys = Keys {
    number: Some("tool_call_id"),
    name: "tool_name",
    arguments: "parameters",
};

const GEMMA: Syntax = Syntax {
    around: "",
    each: true,
    separator: "",
    head: Some(Head::new(&["call:"], &[])),
    ..Syntax::COMMON
};

/// A message of another role follows the assistant's, or a marker begins a call.
const GIGACHAT: Syntax = Syntax {
    begin: &[
        "<|message_sep|>\n\nfunction call<|role_sep|>",
        "function call<|role_sep|>",
        "<|function_call|>",
    ],
    around: "",
    skipped: &["<|message_sep|>"],
    // Templates write one call of a turn.
    single: true,
    each: true,
    separator: "",
    markers: &["<|message_sep|>", "<|role_sep|>", "<|function_call|>"],
    ..Syntax::COMMON
};

const MISTRAL: Syntax = Syntax {
    begin: &["[TOOL_CALLS]"],
    head: Some(Head::new(&[], &["["])),
    markers: &["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"],
    id_len: Some(9),
    ..Syntax::COMMON
};

const QWEN: Tags = Tags {
    function: "<function=",
    after_name: ">",
    end_function: "</function>",
    parameter: ["<parameter=", ">"],
    typed: None,
    value: "",
    end_parameter: "</parameter>",
    lines: true,
    ends_of_values: &["\n<parameter=", "\n</function>", "\n</tool_call>"],
};

/// All formats, in the order in which a template's is looked for.
pub static FORMATS: [Syntax; ToolFormat::COUNT] = [
    Syntax {
        format: ToolFormat::Harmony,
        name: "openai",
        help: "Messages to functions.NAME, as gpt-oss: reasoning, too",
        is_taught: harmony::is_template,
        body: Body::Harmony,
        markers: harmony::MARKERS,
        // The template shows the first call of a turn only.
        single: true,
        ..Syntax::COMMON
    },
    deepseek::V3,
    deepseek::V31,
    deepseek::V32,
    deepseek::V4,
    Syntax {
        format: ToolFormat::KimiK2,
        name: "kimi_k2",
        help: "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}, as Kimi K2",
        is_taught: |source| source.contains("<|tool_call_begin|>"),
        begin: &["<|tool_calls_section_begin|>"],
        end: "<|tool_calls_section_end|>",
        call: "<|tool_call_begin|>",
        around: "",
        skipped: &["<|tool_call_end|>"],
        written: ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"],
        separator: "",
        body: Body::Named(Named {
            before: "<|tool_call_begin|>functions.",
            numbered: true,
            between: "<|tool_call_argument_begin|>",
            after: "<|tool_call_end|>",
        }),
        head: Some(Head::new(
            &["<|tool_call_begin|>", "functions."],
            &[":", "<|tool_call_argument_begin|>"],
        )),
        markers: &[
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ],
        ..Syntax::COMMON
    },
    Syntax {
        format: ToolFormat::MinimaxM2,
        name: "minimax_m2",
        help: "<minimax:tool_call><invoke name=\"...\"><parameter name=\"...\">, as MiniMax M2",
        is_taught: |source| source.contains("<minimax:tool_call>"),
        begin: &["<minimax:tool_call>"],
        end: "</minimax:tool_call>",
        call: "<invoke name=\"",
        around: "",
        written: ["<minimax:tool_call>\n", "\n</minimax:tool_call>"],
        separator: "\n",
        body: Body::Tags(Tags {
            function: "<invoke name=\"",
            after_name: "\">",
            end_function: "</invoke>",
            parameter: ["<parameter name=\"", "\">"],
            typed: None,
            value: "",
            end_parameter: "</parameter>",
            lines: false,
            ends_of_values: &[],
        }),
        markers: &["<minimax:tool_call>", "</minimax:tool_call>"],
        ..Syntax::COMMON
    },
    Syntax {
        format: ToolFormat::Gemma4,
        name: "gemma4",
        help: "<|tool_call>call:NAME{key:value}<tool_call|>, as Gemma 4",
        is_taught: |source| source.contains("<|tool_call>"),
        begin: &["<|tool_call>"],
        end: "<tool_call|>",
        written: ["<|tool_call>", "<tool_call|>"],
        body: Body::Braces("<|\"|>"),
        markers: &["<|tool_call>", "<tool_call|>", "<|\"|>"],
        ..GEMMA
    },
    Syntax {
        format: ToolFormat::FunctionGemma,
        name: "functiongemma",
        help: "<start_function_call>call:NAME{key:value}<end_function_call>, as FunctionGemma",
        is_taught: |source| source.contains("<start_function_call>"),
        begin: &["<start_function_call>"],
        end: "<end_function_call>",
        written: ["<start_function_call>", "<end_function_call>"],
        body: Body::Braces("<escape>"),
        markers: &["<start_function_call>", "<end_function_call>", "<escape>"],
        ..GEMMA
    },
    Syntax {
        format: ToolFormat::SeedOss,
        name: "seed_oss",
        help: "<seed:tool_call><function=...><parameter=...>, as Seed-OSS",
        is_taught: |source| source.contains("<seed:tool_call>"),
        begin: &["<seed:tool_call>"],
        end: "</seed:tool_call>",
        call: QWEN.function,
        around: "",
        written: ["<seed:tool_call>\n", "\n</seed:tool_call>"],
        each: true,
        separator: "\n",
        body: Body::Tags(Tags {
            lines: false,
            ends_of_values: &[],
            ..QWEN
        }),
        markers: &["<seed:tool_call>", "</seed:tool_call>"],
        ..Syntax::COMMON
    },
    Syntax {
        format: ToolFormat::Lfm2,
        name: "lfm2",
        help: "<|tool_call_start|>[f(a=1)]<|tool_call_end|>, as LFM2",
        is_taught: |source| {
            has_any(
                source,
                &[
                    "<|tool_call_start|>",
                    "<|tool_list_start|>",
                    "<|tool_response_start|>",
                ],
            )
        },
        begin: &["<|tool_call_start|>"],
        end: "<|tool_call_end|>",
        written: ["<|tool_call_start|>[", "]<|tool_call_end|>"],
        body: Body::Python,
        markers: &["<|tool_call_start|>", "<|tool_call_end|>"],
        ..Syntax::COMMON
    },
    Syntax {
        format: ToolFormat::Olmo3,
        name: "olmo3",
        help: "<function_calls> and a call in Python on each line, as OLMo 3",
        is_taught: |source| source.contains("<function_calls>"),
        begin: &["<function_calls>"],
        end: "</function_calls>",
        written: ["<function_calls>\n", "\n</function_calls>"],
        separator: "\n",
        body: Body::Python,
        markers: &["<function_calls>", "</function_calls>"],
        ..Syntax::COMMON
    },
    Syntax {
        format: ToolFormat::Command,
        name: "cohere_command3",
        help: "<|START_ACTION|>[{\"tool_name\": ..., \"parameters\": {...}}], as Command A and R7B",
        is_taught: |source| source.contains("<|START_ACTION|>"),
        begin: &["<|START_ACTION|>"],
        end: "<|END_ACTION|>",
        written: ["<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>"],
        separator: ",\n    ",
        body: Body::Object(COMMAND),
        markers: &["<|START_ACTION|>", "<|END_ACTION|>"],
        ..Syntax::COMMON
    },
    Syntax {
        format: ToolFormat::CommandR,
        name: "cohere_command_r",
        help: "Action: and [{\"tool_name\": ..., \"parameters\": {...}}] in a fence, as Command R and R+",
        is_taught: |source| has_all(source, &["Action:", "```json", "tool_name"]),
        begin: &["Action: ```json", "Action:```json", "Action:\n```json"],
        skipped: &["```"],
        written: ["Action: ```json\n[\n    ", "\n]```"],
        separator: ",\n    ",
        body: Body::Object(Keys {
            number: None,
            ..COMMAND
        }),
        ..Syntax::COMMON
    },
    Syntax {
        format: ToolFormat::Apertus,
        name: "apertus",
        help: "<|tools_prefix|>[{NAME: {...}}]<|tools_suffix|>, as Apertus",
        is_taught: |source| source.contains("<|tools_prefix|>"),
        begin: &["<|tools_prefix|>"],
        end: "<|tools_suffix|>",
        // Each call is an object with the name as its only key.
        around: "[{,}]",
        written: ["<|tools_prefix|>[", "]<|tools_suffix|>"],
        body: Body::Named(Named::new("{\"", "\": ", "}")),
        head: Some(Head::new(&["\""], &["\""])),
        markers: &["<|tools_prefix|>", "<|tools_suffix|>"],
        ..Syntax::COMMON
    },
    Syntax {
        format: ToolFormat::Gigachat31,
        name: "gigachat31",
        help: "<|function_call|>{\"name\": ..., \"arguments\": {...}}, as GigaChat 3.1; gigachat3 reads it, too",
        is_taught: |source| source.contains("<|function_call|>") && source.contains("<|role_sep|>"),
        written: ["<|function_call|>", ""],
        ..GIGACHAT
    },
    Syntax {
        format: ToolFormat::Gigachat3,
        name: "gigachat3",
        help: "The message function call<|role_sep|> of {\"name\": ..., \"arguments\": {...}}, as GigaChat 3; a template with <|function_call|> makes it gigachat31",
        is_taught: |source| source.contains("function call") && source.contains("<|role_sep|>"),
        written: ["<|message_sep|>\n\nfunction call<|role_sep|>\n", ""],
        ..GIGACHAT
    },
    Syntax {
        format: ToolFormat::Phi4Mini,
        name: "phi4_mini_json",
        help: "<|tool_call|>[{\"name\": ..., \"arguments\": {...}}]<|/tool_call|>, as Phi-4-mini",
        is_taught: |source| has_any(source, &["<|/tool_call|>", "<|/tool|>", "functools["]),
        begin: &["<|tool_call|>", "functools"],
        end: "<|/tool_call|>",
        written: ["<|tool_call|>[", "]<|/tool_call|>"],
        markers: &["<|tool_call|>", "<|/tool_call|>"],
        ..Syntax::COMMON
    },
    Syntax {
        format: ToolFormat::Granite,
        name: "granite",
        help: "<|tool_call|>[{\"name\": ..., \"arguments\": {...}}], as Granite 3",
        is_taught: |source| source.contains("<|tool_call|>"),
        begin: &["<|tool_call|>", "<tool_call>"],
        written: ["<|tool_call|>[", "]"],
        markers: &["<|tool_call|>", "<tool_call>"],
        ..Syntax::COMMON
    },
    Syntax {
        format: ToolFormat::Nemotron,
        name: "nemotron_json",
        help: "<TOOLCALL>[{\"name\": ..., \"arguments\": {...}}]</TOOLCALL>, as Nemotron",
        is_taught: |source| source.contains("<TOOLCALL>"),
        begin: &["<TOOLCALL>"],
        end: "</TOOLCALL>",
        written: ["<TOOLCALL>[", "]</TOOLCALL>"],
        markers: &["<TOOLCALL>", "</TOOLCALL>"],
        ..Syntax::COMMON
    },
    Syntax {
        format: ToolFormat::Hunyuan,
        name: "hunyuan_a13b",
        aliases: &["jamba", "minimax"],
        help: "<tool_calls>[{\"name\": ..., \"arguments\": {...}}]</tool_calls>, as Hunyuan, Jamba and MiniMax M1",
        is_taught: |source| source.contains("<tool_calls>"),
        begin: &["<tool_calls>"],
        end: "</tool_calls>",
        skipped: &["```", "</tool_call>"],
        written: ["<tool_calls>[", "]</tool_calls>"],
        // Hunyuan's dense models name a function before a fence.
        head: Some(Head::new(
            &["<tool_call>", "function<tool_sep>"],
            &["<tool_sep>", "\n", "```"],
        )),
        markers: &[
            "<tool_calls>",
            "</tool_calls>",
            "<tool_call>",
            "</tool_call>",
            "<tool_sep>",
        ],
        ..Syntax::COMMON
    },
    Syntax {
        format: ToolFormat::Glm45,
        name: "glm45",
        aliases: &["glm47"],
        help: "<tool_call>NAME<arg_key>...</arg_key><arg_value>...</arg_value></tool_call>, as GLM-4.5 to 4.7",
        is_taught: |source| source.contains("<tool_call>") && source.contains("<arg_key>"),
        begin: &["<tool_call>"],
        end: "</tool_call>",
        around: "",
        written: ["<tool_call>", "</tool_call>"],
        each: true,
        separator: "\n",
        body: Body::Tags(Tags {
            function: "",
            after_name: "",
            end_function: "",
            parameter: ["<arg_key>", "</arg_key>"],
            typed: None,
            value: "<arg_value>",
            end_parameter: "</arg_value>",
            lines: false,
            ends_of_values: &["\n</tool_call>"],
        }),
        markers: &[
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
        ],
        ..Syntax::COMMON
    },
    Syntax {
        format: ToolFormat::Glm4,
        name: "glm4",
        help: "NAME, a line break, {...}, and nothing else, as GLM-4",
        is_taught: |source| has_all(source, &["<|observation|>", "metadata"]),
        is_named_first: true,
        // A call ends its turn.
        single: true,
        separator: "\n",
        body: Body::Named(Named::new("", "\n", "")),
        head: Some(Head::new(&[], &["\n"])),
        ..Syntax::COMMON
    },
    Syntax {
        format: ToolFormat::Qwen3Coder,
        name: "qwen3_coder",
        aliases: &["qwen3_xml", "mimo"],
        help: "<tool_call><function=...><parameter=...>, as Qwen3-Coder and Qwen 3.5",
        is_taught: |source| source.contains("<tool_call>") && source.contains(QWEN.function),
        begin: &["<tool_call>"],
        end: "</tool_call>",
        // Left out before it at times.
        call: QWEN.function,
        around: "",
        written: ["<tool_call>\n", "\n</tool_call>"],
        each: true,
        separator: "\n",
        body: Body::Tags(QWEN),
        markers: &["<tool_call>", "</tool_call>"],
        ..Syntax::COMMON
    },
    Syntax {
        format: ToolFormat::Hermes,
        name: "hermes",
        aliases: &["ernie45", "granite4"],
        help: "<tool_call>{\"name\": ..., \"arguments\": {...}}</tool_call>, as Hermes, Qwen 2.5 and 3, Granite 4, EXAONE 4 and ERNIE 4.5",
        is_taught: |source| source.contains("<tool_call>"),
        begin: &["<tool_call>"],
        end: "</tool_call>",
        written: ["<tool_call>\n", "\n</tool_call>"],
        each: true,
        separator: "\n",
        markers: &["<tool_call>", "</tool_call>"],
        ..Syntax::COMMON
    },
    Syntax {
        format: ToolFormat::Functionary31,
        name: "functionary_v31",
        help: "<function=NAME>{...}</function>, as Functionary 3.1",
        is_taught: |source| source.contains(QWEN.function),
        call: QWEN.function,
        around: "",
        skipped: &[QWEN.end_function],
        separator: "",
        body: Body::Named(Named::new(
            QWEN.function,
            QWEN.after_name,
            QWEN.end_function,
        )),
        head: Some(Head::new(&[QWEN.function], &[QWEN.after_name])),
        ..Syntax::COMMON
    },
    Syntax {
        format: ToolFormat::MistralArgs,
        name: "mistral_args",
        help: "[TOOL_CALLS]NAME[ARGS]{...}, as Mistral since 2025-06; mistral reads it, too",
        is_taught: |source| source.contains("[TOOL_CALLS]") && source.contains("[ARGS]"),
        written: ["[TOOL_CALLS]", ""],
        each: true,
        separator: "",
        body: Body::Named(Named::new("", "[ARGS]", "")),
        ..MISTRAL
    },
    Syntax {
        format: ToolFormat::Mistral,
        name: "mistral",
        help: "[TOOL_CALLS] [{\"name\": ..., \"arguments\": {...}}], as Mistral; a template with [ARGS] makes it mistral_args",
        is_taught: |source| source.contains("[TOOL_CALLS]"),
        written: ["[TOOL_CALLS] [", "]"],
        ..MISTRAL
    },
    Syntax {
        format: ToolFormat::Xlam,
        name: "xlam",
        help: "[{\"name\": ..., \"arguments\": {...}}] alone, in a fence or in <tool_call>, as xLAM",
        // The example of these templates.
        is_taught: |source| source.contains("\"tool_call_name\""),
        begin: &["[TOOL_CALLS]", "<tool_call>", "```json"],
        end: "</tool_call>",
        skipped: &["```"],
        bare: Some('['),
        written: ["[", "]"],
        markers: &["[TOOL_CALLS]", "<tool_call>", "</tool_call>"],
        ..Syntax::COMMON
    },
    Syntax {
        format: ToolFormat::Pythonic,
        name: "pythonic",
        aliases: &["llama4_pythonic"],
        help: "[f(a=1), g()] and nothing else, as Llama 4 and 3.2",
        // The example of these templates.
        is_taught: |source| source.contains("func_name1("),
        // Gemma 3 writes calls in a fence.
        begin: &["<|python_start|>", "<|python_tag|>", "```tool_code"],
        end: "<|python_end|>",
        skipped: &["```"],
        bare: Some('['),
        written: ["[", "]"],
        body: Body::Python,
        markers: &["<|python_start|>", "<|python_end|>", "<|python_tag|>"],
        ..Syntax::COMMON
    },
    Syntax {
        format: ToolFormat::Llama3Json,
        name: "llama3_json",
        aliases: &["llama4_json"],
        help: "{\"name\": ..., \"parameters\": {...}} and nothing else, as Llama 3.1 and 3.2",
        is_taught: |source| has_any(source, &["<|python_tag|>", "ipython"]),
        begin: &["<|python_tag|>"],
        around: ";,",
        bare: Some('{'),
        // Llama makes one call at a time, and its templates refuse messages with several calls.
        single: true,
        separator: "; ",
        body: Body::Object(Keys {
            arguments: "parameters",
            ..Keys::COMMON
        }),
        markers: &["<|python_tag|>"],
        ..Syntax::COMMON
    },
];
