//! What distinguishes layers with experts.

use foretoken_kernels::Activation;

/// The experts of a layer. A router gives each row the `per_token` experts of the highest score, of equal ones the
/// first; their outputs are added with these scores as weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertsSpec {
    /// The activation function of the experts.
    pub activation: Activation,
    /// Whether an expert is like [`MlpSpec::Gated`](crate::MlpSpec::Gated), and not like `Plain`.
    pub is_gated: bool,
    /// Number of experts.
    pub count: usize,
    /// Number of experts of a row.
    pub per_token: usize,
    /// Width of one.
    pub width: usize,
    /// How the router's logits become scores.
    pub scores: RouterScores,
    /// The tensor that is added to scores where they are compared, but not in weights.
    pub correction: Option<&'static str>,
    /// The groups that are chosen before experts.
    pub groups: Option<ExpertGroups>,
    /// Whether the weights of a row's experts are divided by their sum, or by `min_sum`, if that is more.
    pub is_normalized: bool,
    /// The least divisor of the weights; finite and at least 0.
    pub min_sum: f32,
    /// Factor of the weights.
    pub scale: f32,
    /// Whether the router has a bias, and the products of the experts.
    pub has_bias: bool,
    /// Whether a tensor of all experts has the inputs of a product before its outputs.
    pub is_transposed: bool,
    /// Whether random weights of them are MXFP4, as the configuration says of files, whose tensors tell it.
    pub is_mxfp4: bool,
    /// Whether experts, their router and the expert of all rows read the residual stream, each through a norm of its own
    /// (Gemma 4). Then their outputs have norms, too, and the weights of a row's experts have a factor of each expert.
    pub has_norms: bool,
    /// A further expert, that of all rows.
    pub shared: Option<SharedExpert>,
}

/// How the logits of a router become scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouterScores {
    /// The softmax over the logits.
    Softmax,
    /// The sigmoid of each logit.
    Sigmoid,
}

/// Groups of as many experts one after another. A row has experts of those whose best have the highest sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Number of groups.
    pub count: usize,
    /// Number of groups of a row.
    pub per_token: usize,
    /// Number of experts whose scores are added for a group.
    pub best: usize,
}

/// An expert of all rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedExpert {
    /// The name that its tensors have in place of `mlp`.
    pub name: &'static str,
    /// Width of the expert.
    pub width: usize,
    /// Whether its output has a factor of each row, the sigmoid of a product.
    pub has_gate: bool,
    /// Whether the gate and what it multiplies are one tensor, `gate_up_proj`.
    pub is_fused: bool,
}

impl SharedExpert {
    /// The expert `name` of this width, without a factor of rows, and with a tensor for each product.
    pub fn new(name: &'static str, width: usize) -> Self {
        Self {
            name,
            width,
            has_gate: false,
            is_fused: false,
        }
    }
}

/// Maximum number of experts of a layer.
const MAX_EXPERTS: usize = 1 << 12;
/// Maximum width of an expert.
const MAX_EXPERT_WIDTH: usize = 1 << 22;

impl ExpertsSpec {
    pub(crate) fn check(&self) -> Result<(), String> {
        let Self {
            count,
            per_token,
            width,
            shared,
            groups,
            ..
        } = *self;
        if !(1..=MAX_EXPERTS).contains(&count) {
            return Err(format!(
                "{count} experts are not supported: from 1 to {MAX_EXPERTS} are"
            ));
        }
        if !(1..=count).contains(&per_token) {
            return Err(format!(
                "{per_token} experts of {count} for each token are not supported: from 1 to {count} are"
            ));
        }
        if let Some(groups) = groups {
            groups.check(count, per_token)?;
        }
        if !(self.scale.is_finite() && self.min_sum.is_finite() && self.min_sum >= 0.) {
            return Err(format!(
                "experts with weights times {} and divided by at least {} are not supported: both must be finite",
                self.scale, self.min_sum
            ));
        }
        let shared = shared.map(|shared| shared.width);
        let mut widths = [Some(width), shared].into_iter().flatten();
        match widths.find(|width| !(1..=MAX_EXPERT_WIDTH).contains(width)) {
            None => Ok(()),
            Some(width) => Err(format!(
                "experts of width {width} are not supported: from 1 to {MAX_EXPERT_WIDTH} are"
            )),
        }
    }
}

impl ExpertGroups {
    /// Checks them for a router that gives a row `per_token` of `experts`.
    fn check(self, experts: usize, per_token: usize) -> Result<(), String> {
        let size = experts / self.count.max(1);
        let is_even = self.count > 0 && experts.is_multiple_of(self.count) && size >= self.best;
        if !is_even {
            return Err(format!(
                "{} groups of {experts} experts are not supported: each must have as many, and {} or more",
                self.count, self.best
            ));
        }
        let fits = (1..=self.count).contains(&self.per_token) && per_token <= size * self.per_token;
        if fits {
            return Ok(());
        }
        Err(format!(
            "{} of {} groups for each token are not supported: they must have its {per_token} experts",
            self.per_token, self.count
        ))
    }
}
