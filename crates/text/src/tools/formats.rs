//! The formats of tool calls, a row each.

use super::ToolFormat;
use super::syntax::{Body, Head, Keys, Named, Syntax, Tags};
use crate::harmony;

/// A row with what most formats have in common.
const COMMON: Syntax = Syntax {
    format: ToolFormat::Hermes,
    name: "",
    aliases: &[],
    help: "",
    is_taught: |_| false,
    begin: &[],
    end: "",
    call: "",
    around: "[,]",
    skipped: &[],
    bare: None,
    single: false,
    written: ["", ""],
    each: false,
    separator: ", ",
    body: Body::Object(NAME_AND_ARGUMENTS),
    head: None,
    markers: &[],
};

const NAME_AND_ARGUMENTS: Keys = Keys {
    number: None,
    name: "name",
    arguments: "arguments",
};

/// DeepSeek's markers: around calls, around a call, and after what a call is of or its name.
const CALLS: [&str; 2] = ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"];
const CALL: [&str; 2] = ["<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"];
const SEPARATOR: &str = "<｜tool▁sep｜>";

const DEEPSEEK: Syntax = Syntax {
    begin: &[CALLS[0]],
    end: CALLS[1],
    call: CALL[0],
    around: "",
    skipped: &["```", CALL[1]],
    written: CALLS,
    head: Some(Head {
        before: &[CALL[0], "function<｜tool▁sep｜>"],
        ends: &[SEPARATOR, "\n", "```"],
    }),
    markers: &[CALLS[0], CALLS[1], CALL[0], CALL[1], SEPARATOR],
    ..COMMON
};

/// The mark in the tags of DeepSeek since V3.2, which is a token.
const DSML: &str = "｜DSML｜";

/// The tags of DeepSeek since V3.2 say whether a value is a text. Its versions name the tag around calls differently.
const DEEPSEEK_DSML: Syntax = Syntax {
    call: "<｜DSML｜invoke name=\"",
    around: "",
    separator: "\n",
    body: Body::Tags(Tags {
        function: "<｜DSML｜invoke name=\"",
        after_name: "\">",
        end_function: "</｜DSML｜invoke>",
        parameter: ["<｜DSML｜parameter name=\"", "\">"],
        typed: Some(["\" string=\"true\">", "\" string=\"false\">"]),
        value: "",
        end_parameter: "</｜DSML｜parameter>",
        lines: false,
        ends_of_values: &[],
    }),
    markers: &[DSML],
    ..COMMON
};

const GEMMA: Syntax = Syntax {
    around: "",
    each: true,
    separator: "",
    head: Some(Head {
        before: &["call:"],
        ends: &[],
    }),
    ..COMMON
};

const MISTRAL: Syntax = Syntax {
    begin: &["[TOOL_CALLS]"],
    head: Some(Head {
        before: &[],
        ends: &["["],
    }),
    markers: &["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"],
    ..COMMON
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
        ..COMMON
    },
    Syntax {
        format: ToolFormat::DeepseekV3,
        name: "deepseek_v3",
        help: "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME and JSON in a fence, as DeepSeek V3 and R1",
        is_taught: |source| source.contains(CALLS[0]) && source.contains("```json"),
        separator: "\n",
        body: Body::Named(Named {
            before: "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            numbered: false,
            between: "\n```json\n",
            after: "\n```<｜tool▁call▁end｜>",
        }),
        ..DEEPSEEK
    },
    Syntax {
        format: ToolFormat::DeepseekV31,
        name: "deepseek_v31",
        help: "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}, as DeepSeek V3.1",
        is_taught: |source| source.contains(CALLS[0]),
        separator: "",
        body: Body::Named(Named {
            before: CALL[0],
            numbered: false,
            between: SEPARATOR,
            after: CALL[1],
        }),
        ..DEEPSEEK
    },
    Syntax {
        format: ToolFormat::DeepseekV32,
        name: "deepseek_v32",
        help: "<｜DSML｜function_calls><｜DSML｜invoke name=\"...\"><｜DSML｜parameter name=\"...\" string=\"true\">, as DeepSeek V3.2",
        is_taught: |source| source.contains(DSML) && source.contains("function_calls>"),
        begin: &["<｜DSML｜function_calls>"],
        end: "</｜DSML｜function_calls>",
        written: ["<｜DSML｜function_calls>\n", "\n</｜DSML｜function_calls>"],
        ..DEEPSEEK_DSML
    },
    Syntax {
        format: ToolFormat::DeepseekV4,
        name: "deepseek_v4",
        help: "<｜DSML｜tool_calls>, and the tags of deepseek_v32, as DeepSeek V4",
        is_taught: |source| source.contains(DSML),
        begin: &["<｜DSML｜tool_calls>"],
        end: "</｜DSML｜tool_calls>",
        written: ["<｜DSML｜tool_calls>\n", "\n</｜DSML｜tool_calls>"],
        ..DEEPSEEK_DSML
    },
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
        head: Some(Head {
            before: &["<|tool_call_begin|>", "functions."],
            ends: &[":", "<|tool_call_argument_begin|>"],
        }),
        markers: &[
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ],
        ..COMMON
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
        ..COMMON
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
        ..COMMON
    },
    Syntax {
        format: ToolFormat::Lfm2,
        name: "lfm2",
        help: "<|tool_call_start|>[f(a=1)]<|tool_call_end|>, as LFM2",
        is_taught: |source| {
            let marks = [
                "<|tool_call_start|>",
                "<|tool_list_start|>",
                "<|tool_response_start|>",
            ];
            marks.iter().any(|mark| source.contains(mark))
        },
        begin: &["<|tool_call_start|>"],
        end: "<|tool_call_end|>",
        written: ["<|tool_call_start|>[", "]<|tool_call_end|>"],
        body: Body::Python,
        markers: &["<|tool_call_start|>", "<|tool_call_end|>"],
        ..COMMON
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
        ..COMMON
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
        body: Body::Object(Keys {
            number: Some("tool_call_id"),
            name: "tool_name",
            arguments: "parameters",
        }),
        markers: &["<|START_ACTION|>", "<|END_ACTION|>"],
        ..COMMON
    },
    Syntax {
        format: ToolFormat::Phi4Mini,
        name: "phi4_mini_json",
        help: "<|tool_call|>[{\"name\": ..., \"arguments\": {...}}]<|/tool_call|>, as Phi-4-mini",
        is_taught: |source| {
            let marks = ["<|/tool_call|>", "<|/tool|>", "functools["];
            marks.iter().any(|mark| source.contains(mark))
        },
        begin: &["<|tool_call|>", "functools"],
        end: "<|/tool_call|>",
        written: ["<|tool_call|>[", "]<|/tool_call|>"],
        markers: &["<|tool_call|>", "<|/tool_call|>"],
        ..COMMON
    },
    Syntax {
        format: ToolFormat::Granite,
        name: "granite",
        help: "<|tool_call|>[{\"name\": ..., \"arguments\": {...}}], as Granite 3",
        is_taught: |source| source.contains("<|tool_call|>"),
        begin: &["<|tool_call|>", "<tool_call>"],
        written: ["<|tool_call|>[", "]"],
        markers: &["<|tool_call|>", "<tool_call>"],
        ..COMMON
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
        ..COMMON
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
        head: Some(Head {
            before: &["<tool_call>", "function<tool_sep>"],
            ends: &["<tool_sep>", "\n", "```"],
        }),
        markers: &[
            "<tool_calls>",
            "</tool_calls>",
            "<tool_call>",
            "</tool_call>",
            "<tool_sep>",
        ],
        ..COMMON
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
        ..COMMON
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
        ..COMMON
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
        ..COMMON
    },
    Syntax {
        format: ToolFormat::MistralArgs,
        name: "mistral_args",
        help: "[TOOL_CALLS]NAME[ARGS]{...}, as Mistral since 2025-06; mistral reads it, too",
        is_taught: |source| source.contains("[TOOL_CALLS]") && source.contains("[ARGS]"),
        written: ["[TOOL_CALLS]", ""],
        each: true,
        separator: "",
        body: Body::Named(Named {
            before: "",
            numbered: false,
            between: "[ARGS]",
            after: "",
        }),
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
        ..COMMON
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
        ..COMMON
    },
    Syntax {
        format: ToolFormat::Llama3Json,
        name: "llama3_json",
        aliases: &["llama4_json"],
        help: "{\"name\": ..., \"parameters\": {...}} and nothing else, as Llama 3.1 and 3.2",
        is_taught: |source| {
            let marks = ["<|python_tag|>", "ipython"];
            // Functionary's models write calls otherwise.
            marks.iter().any(|mark| source.contains(mark)) && !source.contains("<function=")
        },
        begin: &["<|python_tag|>"],
        around: ";,",
        bare: Some('{'),
        // Llama makes one call at a time, and its templates refuse messages with several calls.
        single: true,
        separator: "; ",
        body: Body::Object(Keys {
            arguments: "parameters",
            ..NAME_AND_ARGUMENTS
        }),
        markers: &["<|python_tag|>"],
        ..COMMON
    },
];
