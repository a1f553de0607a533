//! Rotary position embedding: the angles by which layers rotate queries and keys (Su et al. 2021).

/// A rotary position embedding.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeSpec {
    /// Values of a head that are rotated, from the first on: an even number, at most `head_dim`.
    pub width: usize,
    /// The base of the frequencies.
    pub theta: f32,
    /// The rule that changes the frequencies for long contexts, if there is one.
    pub scaling: Option<RopeScaling>,
    /// The scaling of queries by their position, if there is one.
    pub query_scaling: Option<QueryScaling>,
}

/// A rule for longer contexts than those of the first training.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// All frequencies are divided by this.
    Linear(f32),
    /// NTK-aware: the base is multiplied by a power of this, such that the lowest frequency is divided by it.
    Ntk(f32),
    /// The rule of Llama 3.
    Llama3(Llama3Scaling),
    /// The rule of YaRN.
    Yarn(YarnScaling),
    /// The rule of LongRoPE.
    Long(LongScaling),
    /// The frequencies of whole heads, of which a part is rotated.
    Proportional(ProportionalScaling),
}

/// The frequencies of whole heads, of which only the first pairs are rotated (Gemma 4).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ProportionalScaling {
    /// The part of the pairs that is rotated.
    pub part: f32,
    /// Divides all frequencies.
    pub factor: f32,
}

/// Peng et al. 2023, "YaRN" (arXiv 2309.00071): high frequencies are kept, low ones are divided by `factor`.
#[derive(Debug, Clone, PartialEq)]
pub struct YarnScaling {
    pub factor: f32,
    /// Length of the original context, in tokens.
    pub original_max_position_embeddings: usize,
    /// Rotations over the original context from which on a frequency is kept, and up to which it is divided.
    pub beta_fast: f32,
    pub beta_slow: f32,
    /// Whether the pairs between which it interpolates are rounded to whole ones.
    pub truncate: bool,
    /// Factor of cosines and sines.
    pub attention_factor: f32,
    /// How much the scores of attention grow with the logarithm of `factor`, in classes with latent attention; 0 = not.
    pub mscale_all_dim: f32,
}

/// Ding et al. 2024, "LongRoPE" (arXiv 2402.13753).
#[derive(Debug, Clone, PartialEq)]
pub struct LongScaling {
    pub factors: LongFactors,
    /// Factor of cosines and sines.
    pub attention_factor: f32,
}

/// The divisors of the frequencies of a [`LongScaling`].
#[derive(Debug, Clone, PartialEq)]
pub enum LongFactors {
    /// `[width / 2]`.
    Values(Vec<f32>),
    /// The name of a tensor of a GGUF file.
    Tensor(&'static str),
}

/// Queries at position `p` are multiplied by `1 + beta * ln(1 + floor(p / original))` (Ministral 3, Llama 4).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueryScaling {
    pub beta: f32,
    /// Length of the original context, in tokens.
    pub original_max_position_embeddings: usize,
}

/// Llama 3's rule for longer contexts than those of the first training.
#[derive(Debug, Clone, PartialEq)]
pub struct Llama3Scaling {
    /// The divisor of low frequencies.
    pub factor: f32,
    /// Rotations over the original context below which a frequency is divided by `factor`.
    pub low_freq_factor: f32,
    /// Rotations over the original context above which a frequency is kept; more than `low_freq_factor`.
    pub high_freq_factor: f32,
    /// Length of the original context, in tokens.
    pub original_max_position_embeddings: usize,
}

impl RopeSpec {
    /// One without scaling.
    pub fn plain(width: usize, theta: f32) -> Self {
        Self {
            width,
            theta,
            scaling: None,
            query_scaling: None,
        }
    }

    /// The rotation per position, in radians, of each pair of a head: `[width / 2]`.
    pub fn frequencies(&self) -> Vec<f32> {
        let theta = match self.scaling {
            Some(RopeScaling::Ntk(alpha)) => {
                let width = self.width as f32;
                self.theta * alpha.powf(width / (width - 2.))
            }
            _ => self.theta,
        };
        let plain = (0..self.width)
            .step_by(2)
            .map(|i| 1. / theta.powf(i as f32 / self.width as f32));
        match &self.scaling {
            None | Some(RopeScaling::Ntk(_)) => plain.collect(),
            Some(RopeScaling::Linear(factor)) => plain.map(|f| f / factor).collect(),
            Some(RopeScaling::Llama3(scaling)) => plain.map(|f| scaling.apply(f)).collect(),
            Some(RopeScaling::Yarn(scaling)) => scaling.apply(plain, self.width, self.theta),
            Some(RopeScaling::Long(scaling)) => match &scaling.factors {
                LongFactors::Values(by) => plain.zip(by).map(|(f, by)| f / by).collect(),
                LongFactors::Tensor(_) => plain.collect(),
            },
            Some(RopeScaling::Proportional(scaling)) => {
                let rotated = (scaling.part * self.width as f32 / 2.) as usize;
                let rotated = plain.take(rotated).map(|f| f / scaling.factor);
                let all = rotated.chain(std::iter::repeat(0.));
                all.take(self.width / 2).collect()
            }
        }
    }

    /// The factor of cosines and sines.
    fn attention_factor(&self) -> f32 {
        match &self.scaling {
            Some(RopeScaling::Yarn(scaling)) => scaling.attention_factor,
            Some(RopeScaling::Long(scaling)) => scaling.attention_factor,
            _ => 1.,
        }
    }

    /// The factor of the scores of latent attention.
    pub(crate) fn score_factor(&self) -> f32 {
        match &self.scaling {
            Some(RopeScaling::Yarn(scaling)) => {
                let log = scaling.factor.max(1.).ln();
                (1. + 0.1 * scaling.mscale_all_dim * log).powi(2)
            }
            _ => 1.,
        }
    }

    /// The tensor of a GGUF file that divides the frequencies.
    pub(crate) fn factor_tensor(&self) -> Option<&'static str> {
        match &self.scaling {
            Some(RopeScaling::Long(LongScaling {
                factors: LongFactors::Tensor(name),
                ..
            })) => Some(name),
            _ => None,
        }
    }

    /// Checks it for heads of `head_dim` values and texts of at most `max_positions` tokens.
    pub(crate) fn check(&self, head_dim: usize, max_positions: usize) -> Result<(), String> {
        if !(self.theta.is_finite() && self.theta > 0.) {
            return Err(format!(
                "rope_theta {} must be finite and more than 0",
                self.theta
            ));
        }
        if !self.width.is_multiple_of(2) || self.width == 0 || self.width > head_dim {
            return Err(format!(
                "{} rotated values of a head are not supported: only an even number up to head_dim {head_dim} is",
                self.width
            ));
        }
        match &self.scaling {
            None => {}
            Some(RopeScaling::Linear(factor)) => check_positive(&[("factor", *factor)])?,
            Some(RopeScaling::Ntk(alpha)) => check_positive(&[("alpha", *alpha)])?,
            Some(RopeScaling::Llama3(scaling)) => scaling.check()?,
            Some(RopeScaling::Yarn(scaling)) => scaling.check()?,
            Some(RopeScaling::Long(scaling)) => scaling.check(self.width)?,
            Some(RopeScaling::Proportional(scaling)) => check_positive(&[
                ("partial_rotary_factor", scaling.part),
                ("factor", scaling.factor),
            ])?,
        }
        if let Some(QueryScaling {
            beta,
            original_max_position_embeddings: original,
        }) = self.query_scaling
            && !(beta.is_finite() && beta >= 0. && original > 0)
        {
            return Err(format!(
                "llama_4_scaling_beta {beta} and original_max_position_embeddings {original} must be finite and positive"
            ));
        }
        if !self.has_finite_angles(max_positions, None) {
            return Err(format!(
                "rope_theta {:e} makes angles infinite: it is too small, or a factor of rope_scaling is",
                self.theta
            ));
        }
        Ok(())
    }

    /// Whether all angles of `max_positions` tokens are finite, their frequencies divided by `factors`. The sines
    /// of others would be NaN, and so would be all logits.
    pub(crate) fn has_finite_angles(&self, max_positions: usize, factors: Option<&[f32]>) -> bool {
        let factors = factors.unwrap_or_default().iter().copied();
        let frequencies = self.frequencies().into_iter();
        let angles = frequencies.zip(factors.chain(std::iter::repeat(1.)));
        let mut angles = angles.map(|(f, by)| f / by * max_positions as f32);
        angles.all(f32::is_finite)
    }
}

fn check_positive(values: &[(&str, f32)]) -> Result<(), String> {
    match (values.iter()).find(|(_, value)| !(value.is_finite() && *value > 0.)) {
        None => Ok(()),
        Some((name, value)) => Err(format!(
            "rope_scaling: {name} {value} must be finite and more than 0"
        )),
    }
}

impl YarnScaling {
    fn check(&self) -> Result<(), String> {
        check_positive(&[
            ("factor", self.factor),
            ("beta_fast", self.beta_fast),
            ("beta_slow", self.beta_slow),
            ("attention_factor", self.attention_factor),
            (
                "original_max_position_embeddings",
                self.original_max_position_embeddings as f32,
            ),
        ])
    }

    /// Divides low frequencies by `factor`, keeps high ones, and interpolates those in between (transformers
    /// `modeling_rope_utils.py`, `_compute_yarn_parameters`).
    fn apply(&self, plain: impl Iterator<Item = f32>, width: usize, theta: f32) -> Vec<f32> {
        let (width, original) = (width as f64, self.original_max_position_embeddings as f64);
        // The pair that makes so many rotations over the original context.
        let pair = |rotations: f32| {
            let length = original / (f64::from(rotations) * 2. * std::f64::consts::PI);
            width * length.ln() / (2. * f64::from(theta).ln())
        };
        let (mut low, mut high) = (pair(self.beta_fast), pair(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, mut high) = (low.max(0.) as f32, high.min(width - 1.) as f32);
        if low == high {
            high += 0.001;
        }
        let blend = |(i, f): (usize, f32)| {
            let kept = 1. - ((i as f32 - low) / (high - low)).clamp(0., 1.);
            f / self.factor * (1. - kept) + f * kept
        };
        plain.enumerate().map(blend).collect()
    }
}

impl LongScaling {
    fn check(&self, width: usize) -> Result<(), String> {
        check_positive(&[("attention_factor", self.attention_factor)])?;
        let LongFactors::Values(factors) = &self.factors else {
            return Ok(());
        };
        if factors.len() != width / 2 {
            return Err(format!(
                "rope_scaling: {} factors for {} pairs of a head",
                factors.len(),
                width / 2
            ));
        }
        (factors.iter()).try_for_each(|&factor| check_positive(&[("long_factor", factor)]))
    }
}

impl Llama3Scaling {
    /// Checks that the factors make no frequency zero, infinite or NaN.
    fn check(&self) -> Result<(), String> {
        let positive = [
            ("factor", self.factor),
            ("low_freq_factor", self.low_freq_factor),
            ("high_freq_factor", self.high_freq_factor),
            (
                "original_max_position_embeddings",
                self.original_max_position_embeddings as f32,
            ),
        ];
        check_positive(&positive)?;
        if self.high_freq_factor <= self.low_freq_factor {
            return Err(format!(
                "rope_scaling: high_freq_factor {} must be more than low_freq_factor {}",
                self.high_freq_factor, self.low_freq_factor
            ));
        }
        Ok(())
    }

    /// Long wavelengths are divided by `factor`, short ones are kept, those in between are interpolated
    /// (transformers `modeling_rope_utils.py`, `_compute_llama3_parameters`).
    fn apply(&self, frequency: f32) -> f32 {
        let original = self.original_max_position_embeddings as f32;
        let wavelength = 2. * std::f32::consts::PI / frequency;
        if wavelength < original / self.high_freq_factor {
            return frequency;
        }
        if wavelength > original / self.low_freq_factor {
            return frequency / self.factor;
        }
        let span = self.high_freq_factor - self.low_freq_factor;
        let smooth = (original / wavelength - self.low_freq_factor) / span;
        (1. - smooth) * frequency / self.factor + smooth * frequency
    }
}

/// The rows of a matrix of q or k, in an order in which value `i` of a head is paired with value `i + width / 2`,
/// instead of with its neighbour. Each head has `head_dim` rows, of which the first `width` are paired.
pub(crate) fn halves_from_pairs(heads: usize, head_dim: usize, width: usize) -> Vec<u32> {
    let half = width / 2;
    let within = |row: usize| match row {
        _ if row < half => 2 * row,
        _ if row < width => 2 * (row - half) + 1,
        _ => row,
    };
    let rows =
        (0..heads).flat_map(|head| (0..head_dim).map(move |row| head * head_dim + within(row)));
    rows.map(|row| row as u32).collect()
}

/// A rotary embedding, ready to use.
#[derive(Debug, Clone)]
pub(crate) struct RopeTable {
    /// Radians per position of each pair of a head.
    pub frequencies: Vec<f32>,
    /// The factor of cosines and sines.
    pub attention_factor: f32,
    pub query_scaling: Option<QueryScaling>,
}

impl QueryScaling {
    /// The factor of the query at `position`.
    pub(crate) fn at(self, position: u32) -> f32 {
        let times = position as usize / self.original_max_position_embeddings;
        1. + self.beta * (1. + times as f32).ln()
    }
}

/// The different rotary embeddings of a model's layers.
#[derive(Clone)]
pub(crate) struct RopeTables {
    ropes: Vec<RopeSpec>,
    tables: Vec<RopeTable>,
}

impl RopeTables {
    /// The tables of the layers of a model. `factors`, if the checkpoint contains them, divide the frequencies of the
    /// embeddings that name their tensor. If no embedding names it, they divide those of all.
    pub fn new<'a>(of_layers: impl Iterator<Item = &'a RopeSpec>, factors: Option<&[f32]>) -> Self {
        let mut ropes: Vec<RopeSpec> = Vec::new();
        for rope in of_layers {
            if !ropes.contains(rope) {
                ropes.push(rope.clone());
            }
        }
        let named = ropes.iter().any(|rope| rope.factor_tensor().is_some());
        let table = |rope: &RopeSpec| {
            let factors = factors.filter(|_| rope.factor_tensor().is_some() == named);
            let factors = factors.unwrap_or_default().iter();
            let factors = factors.copied().chain(std::iter::repeat(1.));
            RopeTable {
                frequencies: (rope.frequencies().into_iter().zip(factors))
                    .map(|(frequency, by)| frequency / by)
                    .collect(),
                attention_factor: rope.attention_factor(),
                query_scaling: rope.query_scaling,
            }
        };
        Self {
            tables: ropes.iter().map(table).collect(),
            ropes,
        }
    }

    /// The place of `rope` in [`RopeTables::tables`].
    pub fn index_of(&self, rope: &RopeSpec) -> Option<usize> {
        self.ropes.iter().position(|other| other == rope)
    }

    pub fn tables(&self) -> &[RopeTable] {
        &self.tables
    }
}
