//! Rotary position embedding: the angles by which layers rotate queries and keys (Su et al. 2021).

/// A rotary position embedding.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Values of a head that are rotated, from the first on: an even number, at most `head_dim`.
    pub width: usize,
    /// The base of the frequencies.
    pub theta: f32,
    /// Llama 3's frequency scaling, if the model has it.
    pub scaling: Option<Llama3Scaling>,
}

/// Llama 3's rule for longer contexts than those of the first training.
#[derive(Debug, Clone, PartialEq)]
pub struct Llama3Scaling {
    pub factor: f32,
    pub low_freq_factor: f32,
    pub high_freq_factor: f32,
    /// In tokens.
    pub original_max_position_embeddings: usize,
}

impl Rope {
    /// The rotation per position, in radians, of each pair of a head: `[width / 2]`.
    pub fn frequencies(&self) -> Vec<f32> {
        let plain = (0..self.width)
            .step_by(2)
            .map(|i| 1. / self.theta.powf(i as f32 / self.width as f32));
        match &self.scaling {
            None => plain.collect(),
            Some(scaling) => plain.map(|f| scaling.apply(f)).collect(),
        }
    }

    /// Checks it for heads of `head_dim` values and texts of at most `max_positions` tokens.
    pub(super) fn check(&self, head_dim: usize, max_positions: usize) -> Result<(), String> {
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
        (self.scaling.as_ref()).map_or(Ok(()), Llama3Scaling::check)?;
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
    pub(super) fn has_finite_angles(&self, max_positions: usize, factors: Option<&[f32]>) -> bool {
        let factors = factors.unwrap_or_default().iter().copied();
        let frequencies = self.frequencies().into_iter();
        let angles = frequencies.zip(factors.chain(std::iter::repeat(1.)));
        let mut angles = angles.map(|(f, by)| f / by * max_positions as f32);
        angles.all(f32::is_finite)
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
        for (name, value) in positive {
            if !(value.is_finite() && value > 0.) {
                return Err(format!(
                    "rope_scaling: {name} {value} must be finite and more than 0"
                ));
            }
        }
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

/// The different rotary embeddings of a model's layers.
#[derive(Clone)]
pub(super) struct RopeTables {
    ropes: Vec<Rope>,
    frequencies: Vec<Vec<f32>>,
}

impl RopeTables {
    /// Those of the layers of a model. `factors` divide the frequencies of all, if the checkpoint contains them.
    pub fn new<'a>(of_layers: impl Iterator<Item = &'a Rope>, factors: Option<&[f32]>) -> Self {
        let mut ropes: Vec<Rope> = Vec::new();
        for rope in of_layers {
            if !ropes.contains(rope) {
                ropes.push(rope.clone());
            }
        }
        let mut frequencies: Vec<Vec<f32>> = ropes.iter().map(Rope::frequencies).collect();
        for table in &mut frequencies {
            for (frequency, by) in table.iter_mut().zip(factors.unwrap_or_default()) {
                *frequency /= by;
            }
        }
        Self { ropes, frequencies }
    }

    /// The place of `rope` in [`RopeTables::frequencies`].
    pub fn index_of(&self, rope: &Rope) -> Option<usize> {
        self.ropes.iter().position(|other| other == rope)
    }

    /// Radians per position, of each embedding and each pair of a head.
    pub fn frequencies(&self) -> &[Vec<f32>] {
        &self.frequencies
    }
}
