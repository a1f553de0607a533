//! A target whose rows are dear.

use candle_core::Device;
use foretoken::error::Result;
use foretoken::kv::{KvShape, KvStore};
use foretoken::model::{Batch, ForwardOutput, Model, ModelInfo};
use std::time::{Duration, Instant};

/// A model whose forwards take longer: each row but the first costs a share of a one-row forward
/// more. It waits by spinning, since a sleep is not exact and lets the processor slow down.
pub struct RowPenalty {
    model: Box<dyn Model>,
    /// Cost of a row in one-row forwards.
    penalty: f64,
    /// Seconds of a one-row forward, exponentially averaged, because the machine's speed changes.
    one_row_seconds: Option<f64>,
}

/// Weight of the newest one-row forward in the average.
const NEWEST: f64 = 0.1;

impl RowPenalty {
    /// Adds `penalty` one-row forwards per row to the forwards of `model`; it adds nothing before the
    /// first one-row forward.
    pub fn new(model: Box<dyn Model>, penalty: f64) -> Self {
        Self {
            model,
            penalty,
            one_row_seconds: None,
        }
    }

    /// Returns the time that a forward of `rows` rows that took `spent` must wait.
    fn wait(&mut self, rows: usize, spent: Duration) -> Duration {
        let spent = spent.as_secs_f64();
        if rows == 1 {
            let average = self.one_row_seconds.get_or_insert(spent);
            *average += NEWEST * (spent - *average);
        }
        let one_row = self.one_row_seconds.unwrap_or(0.0);
        Duration::from_secs_f64(rows.saturating_sub(1) as f64 * self.penalty * one_row)
    }
}

impl Model for RowPenalty {
    fn info(&self) -> &ModelInfo {
        self.model.info()
    }

    fn kv_shape(&self) -> KvShape {
        self.model.kv_shape()
    }

    fn device(&self) -> &Device {
        self.model.device()
    }

    fn generates(&self) -> bool {
        self.model.generates()
    }

    fn forward(&mut self, batch: &Batch, kv: &mut KvStore) -> Result<ForwardOutput> {
        let started = Instant::now();
        let output = self.model.forward(batch, kv)?;
        let wait = self.wait(batch.tokens.len(), started.elapsed());
        let computed = Instant::now();
        while computed.elapsed() < wait {
            std::hint::spin_loop();
        }
        Ok(output)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foretoken::model::toy::ToyModel;

    #[test]
    fn each_row_but_the_first_costs_a_share_of_a_one_row_forward() {
        let mut model = RowPenalty::new(Box::new(ToyModel::new(8, 16, 1, 0.0)), 0.5);
        let ms = Duration::from_millis;
        assert_eq!(model.wait(4, ms(9)), ms(0), "nothing is known yet");
        assert_eq!(model.wait(1, ms(10)), ms(0));
        assert_eq!(model.wait(4, ms(99)), ms(15));
        // The machine becomes slower.
        for _ in 0..100 {
            model.wait(1, ms(20));
        }
        let wait = model.wait(3, ms(1));
        assert!(wait > ms(19) && wait < ms(21), "{wait:?}");
    }
}
