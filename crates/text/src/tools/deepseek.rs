//! The formats of DeepSeek's models.

use super::ToolFormat;
use super::syntax::{Body, Head, Named, Syntax, Tags};

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
    ..Syntax::COMMON
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
    ..Syntax::COMMON
};

/// The format of DeepSeek V3 and R1.
pub const V3: Syntax = Syntax {
    format: ToolFormat::DeepseekV3,
    name: "deepseek_v3",
    help: "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME and JSON in a fence, as DeepSeek V3 and R1",
    is_taught: |source| source.contains(CALLS[0]) && source.contains("```json"),
    separator: "\n",
    body: Body::Named(Named::new(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n```json\n",
        "\n```<｜tool▁call▁end｜>",
    )),
    ..DEEPSEEK
};

/// The format of DeepSeek V3.1.
pub const V31: Syntax = Syntax {
    format: ToolFormat::DeepseekV31,
    name: "deepseek_v31",
    help: "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}, as DeepSeek V3.1",
    is_taught: |source| source.contains(CALLS[0]),
    separator: "",
    body: Body::Named(Named::new(CALL[0], SEPARATOR, CALL[1])),
    ..DEEPSEEK
};

/// The format of DeepSeek V3.2.
pub const V32: Syntax = Syntax {
    format: ToolFormat::DeepseekV32,
    name: "deepseek_v32",
    help: "<｜DSML｜function_calls><｜DSML｜invoke name=\"...\"><｜DSML｜parameter name=\"...\" string=\"true\">, as DeepSeek V3.2",
    is_taught: |source| source.contains(DSML) && source.contains("function_calls>"),
    begin: &["<｜DSML｜function_calls>"],
    end: "</｜DSML｜function_calls>",
    written: ["<｜DSML｜function_calls>\n", "\n</｜DSML｜function_calls>"],
    ..DEEPSEEK_DSML
};

/// The format of DeepSeek V4.
pub const V4: Syntax = Syntax {
    format: ToolFormat::DeepseekV4,
    name: "deepseek_v4",
    help: "<｜DSML｜tool_calls>, and the tags of deepseek_v32, as DeepSeek V4",
    is_taught: |source| source.contains(DSML),
    begin: &["<｜DSML｜tool_calls>"],
    end: "</｜DSML｜tool_calls>",
    written: ["<｜DSML｜tool_calls>\n", "\n</｜DSML｜tool_calls>"],
    ..DEEPSEEK_DSML
};
