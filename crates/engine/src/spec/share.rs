//! Work of a step, divided among requests.

/// The work that may be done in a step. Each request in turn may do an equal part of what the requests before
/// it left. So nobody waits for a request that needs much, and little is left undone.
pub struct WorkShare {
    room: usize,
    requests: usize,
}

impl WorkShare {
    /// `room` for the work of so many `requests`.
    pub fn new(room: usize, requests: usize) -> Self {
        Self { room, requests }
    }

    /// Lets the next request work; it gets its part, and lessens it by what it does.
    pub fn give<T>(&mut self, work: impl FnOnce(&mut usize) -> T) -> T {
        let mut part = self.room.div_ceil(self.requests.max(1));
        self.room -= part;
        self.requests = self.requests.saturating_sub(1);
        let done = work(&mut part);
        self.room += part;
        done
    }

    /// The work that is left when all requests have worked.
    pub fn left(self) -> usize {
        self.room
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_leaves_is_for_those_after_it() {
        let mut share = WorkShare::new(100, 4);
        let mut give = |wanted: usize| {
            share.give(|part| {
                let done = wanted.min(*part);
                *part -= done;
                done
            })
        };
        let done = [give(1000), give(5), give(1000), give(2)];
        assert_eq!(done, [25, 5, 35, 2]);
        assert_eq!(share.left(), 33);
        assert_eq!(WorkShare::new(7, 0).left(), 7);
    }
}
