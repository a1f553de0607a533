//! How checkpoints name and store experts.

use super::super::layer_spec::ExpertsSpec;
use super::super::weights::{StackForm, Weights};

/// How a checkpoint names the router, and the products of the experts.
pub struct Layout {
    /// Without `.weight`.
    pub router: &'static str,
    /// Gate and up, or both in one, or only up; `{}` is the number of the expert, without `.weight`. A name without `{}` is a
    /// tensor with the matrices of all.
    pub gate_up: &'static [&'static str],
    pub down: &'static str,
    /// How tensors with the matrices of all have them.
    pub form: StackForm,
    /// Whether the rows of gate and up in one take turns, instead of all of the gate being first.
    pub alternates: bool,
}

/// That of Qwen and of OLMoE.
const EACH: Layout = Layout {
    router: "mlp.gate",
    gate_up: &["mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"],
    down: "mlp.experts.{}.down_proj",
    form: StackForm::Rows,
    alternates: false,
};

/// llama.cpp's, by the names that [`names::gguf`](super::super::names::gguf) translates.
const GGUF: Layout = Layout {
    gate_up: &["mlp.experts.gate_proj.weight", "mlp.experts.up_proj.weight"],
    down: "mlp.experts.down_proj.weight",
    ..EACH
};

/// Those of safetensors.
const LAYOUTS: [Layout; 5] = [
    EACH,
    // Of Mixtral.
    Layout {
        router: "block_sparse_moe.gate",
        gate_up: &[
            "block_sparse_moe.experts.{}.w1",
            "block_sparse_moe.experts.{}.w3",
        ],
        down: "block_sparse_moe.experts.{}.w2",
        ..EACH
    },
    // Of Granite, then that of its class in transformers 5.
    Layout {
        router: "block_sparse_moe.router.layer",
        gate_up: &["block_sparse_moe.input_linear.weight"],
        down: "block_sparse_moe.output_linear.weight",
        ..EACH
    },
    Layout {
        router: "block_sparse_moe.router",
        gate_up: &["block_sparse_moe.experts.gate_up_proj"],
        down: "block_sparse_moe.experts.down_proj",
        ..EACH
    },
    // Of the other classes of transformers 5.
    Layout {
        gate_up: &["mlp.experts.gate_up_proj"],
        down: "mlp.experts.down_proj",
        ..EACH
    },
];

/// Those of experts without gates: of Nemotron-H, and of its class in transformers 5.
const UNGATED: [Layout; 2] = [
    EACH,
    Layout {
        gate_up: &["mlp.experts.up_proj"],
        down: "mlp.experts.down_proj",
        ..EACH
    },
];

/// That of gpt-oss, dense: names of other classes for another order.
const GPT_OSS: Layout = Layout {
    router: "mlp.router",
    gate_up: &["mlp.experts.gate_up_proj"],
    down: "mlp.experts.down_proj",
    form: StackForm::Columns,
    alternates: true,
};

/// Those of experts with biases. The second is that of the published files.
const BIASED: [Layout; 2] = [
    GPT_OSS,
    Layout {
        form: StackForm::Mxfp4,
        ..GPT_OSS
    },
];

impl Layout {
    /// That of `weights`; `at` names the parts of a layer.
    pub fn of(weights: &Weights, spec: &ExpertsSpec, at: impl Fn(&str) -> String) -> &'static Self {
        if weights.are_gguf() {
            return &GGUF;
        }
        let layouts: &[Self] = match (spec.has_bias, spec.is_gated) {
            (true, _) => &BIASED,
            (false, true) => &LAYOUTS,
            (false, false) => &UNGATED,
        };
        let has = |layout: &&Self| {
            let name = layout.down.replace("{}", "0");
            let end = match layout.form {
                StackForm::Mxfp4 => "_blocks",
                _ if name != layout.down => ".weight",
                _ => "",
            };
            weights.has(&at(&format!("{name}{end}")))
        };
        layouts.iter().find(has).unwrap_or(&layouts[0])
    }

    /// The biases of the product `name` of all experts.
    pub fn bias(name: &str) -> String {
        match name.strip_suffix(".weight") {
            Some(name) => format!("{name}.bias"),
            None => format!("{name}_bias"),
        }
    }
}
