//! How checkpoints name and store experts.

use crate::spec::ExpertsSpec;
use crate::weights::{StackForm, Weights};

/// How a checkpoint names the router, and the products of the experts.
pub struct Layout {
    /// The name of the router, without `.weight`.
    pub router: &'static str,
    /// The names of gate and up, or of both in one tensor, or only of up. A name with `{}`, the number of the expert,
    /// is without `.weight`. A name without `{}` is that of a tensor with the matrices of all experts.
    pub gate_up: &'static [&'static str],
    pub down: &'static str,
    /// How a tensor with the matrices of all experts stores them.
    pub form: StackForm,
    /// Whether the rows of gate and up alternate in a tensor that has both, instead of all rows of the gate being
    /// first.
    pub alternates: bool,
}

/// The layout of Qwen and of OLMoE.
const EACH: Layout = Layout {
    router: "mlp.gate",
    gate_up: &["mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"],
    down: "mlp.experts.{}.down_proj",
    form: StackForm::Rows,
    alternates: false,
};

/// The layout of llama.cpp, by the names that [`names::gguf`](crate::names::gguf) translates.
const GGUF: Layout = Layout {
    gate_up: &["mlp.experts.gate_proj.weight", "mlp.experts.up_proj.weight"],
    down: "mlp.experts.down_proj.weight",
    ..EACH
};

/// The layouts of gated experts without biases in safetensors.
const LAYOUTS: [Layout; 5] = [
    EACH,
    // The layout of Mixtral.
    Layout {
        router: "block_sparse_moe.gate",
        gate_up: &[
            "block_sparse_moe.experts.{}.w1",
            "block_sparse_moe.experts.{}.w3",
        ],
        down: "block_sparse_moe.experts.{}.w2",
        ..EACH
    },
    // The layout of Granite, then that of its class in transformers 5.
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
    // The layout of the other classes of transformers 5.
    Layout {
        gate_up: &["mlp.experts.gate_up_proj"],
        down: "mlp.experts.down_proj",
        ..EACH
    },
];

/// The layouts of Qwen3-VL: that of its packed files, and that of its class, whose tensors have inputs before outputs.
const TRANSPOSED: [Layout; 2] = [
    EACH,
    Layout {
        gate_up: &["mlp.experts.gate_up_proj"],
        down: "mlp.experts.down_proj",
        form: StackForm::Columns,
        ..EACH
    },
];

/// The layouts of Gemma 4, whose experts are no part of the MLP: of packed files, and that of its class.
const BESIDE_MLP: [Layout; 2] = [
    Layout {
        router: "router.proj",
        gate_up: &["experts.{}.gate_proj", "experts.{}.up_proj"],
        down: "experts.{}.down_proj",
        ..EACH
    },
    Layout {
        router: "router.proj",
        gate_up: &["experts.gate_up_proj"],
        down: "experts.down_proj",
        ..EACH
    },
];

/// Those of llama.cpp.
const BESIDE_MLP_IN_GGUF: [Layout; 2] = [
    Layout {
        router: "router.proj",
        gate_up: &["experts.gate_up_proj.weight"],
        down: "experts.down_proj.weight",
        ..EACH
    },
    Layout {
        router: "router.proj",
        gate_up: &["experts.gate_proj.weight", "experts.up_proj.weight"],
        down: "experts.down_proj.weight",
        ..EACH
    },
];

/// The layouts of experts without gates: that of Nemotron-H, and that of its class in transformers 5.
const UNGATED: [Layout; 2] = [
    EACH,
    Layout {
        gate_up: &["mlp.experts.up_proj"],
        down: "mlp.experts.down_proj",
        ..EACH
    },
];

/// The layout of gpt-oss with dense weights. It has names of other classes, but another order.
const GPT_OSS: Layout = Layout {
    router: "mlp.router",
    gate_up: &["mlp.experts.gate_up_proj"],
    down: "mlp.experts.down_proj",
    form: StackForm::Columns,
    alternates: true,
};

/// That of the published files.
const PUBLISHED_GPT_OSS: Layout = Layout {
    form: StackForm::Mxfp4,
    ..GPT_OSS
};

/// The layouts of experts with biases.
const BIASED: [Layout; 2] = [GPT_OSS, PUBLISHED_GPT_OSS];

impl Layout {
    /// The layout of the experts in `weights`; `at` names the parts of a layer.
    pub fn of(weights: &Weights, spec: &ExpertsSpec, at: impl Fn(&str) -> String) -> &'static Self {
        if weights.are_gguf() {
            let [fused, apart] = &BESIDE_MLP_IN_GGUF;
            return if !spec.has_norms {
                &GGUF
            } else if weights.has(&at("experts.up_proj.weight")) {
                apart
            } else {
                fused
            };
        }
        if weights.are_random() && spec.is_mxfp4 {
            return &PUBLISHED_GPT_OSS;
        }
        let layouts: &[Self] = match (spec.has_bias, spec.is_gated) {
            _ if spec.has_norms => &BESIDE_MLP,
            (true, _) => &BIASED,
            (false, true) if spec.is_transposed => &TRANSPOSED,
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

    /// What other layouts call `name`, a part of `mlp`.
    pub fn part(&self, name: &str) -> String {
        let place = self.router.split('.').next().unwrap_or_default();
        name.replacen("mlp", place, 1)
    }

    /// The biases of the product `name` of all experts.
    pub fn bias(name: &str) -> String {
        match name.strip_suffix(".weight") {
            Some(name) => format!("{name}.bias"),
            None => format!("{name}_bias"),
        }
    }
}
