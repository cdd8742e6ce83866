//! Learning-rate schedules: linear warm-up, then constant, cosine or linear to a floor.

/// The form after warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScheduleKind {
    Constant,
    Cosine,
    Linear,
}

/// The learning rate as a function of the step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    pub kind: ScheduleKind,
    /// The rate at the end of warm-up.
    pub peak: f64,
    /// Steps of linear warm-up.
    pub warmup: u64,
    /// Steps of the whole run.
    pub steps: u64,
    /// The last rate as a fraction of the peak.
    pub floor: f64,
}

impl Schedule {
    /// The rate of step `step`, from 0. Warm-up gives `peak · (step + 1) / warmup`; the decay reaches
    /// the floor at the last step.
    pub fn lr(&self, step: u64) -> f64 {
        if step < self.warmup {
            return self.peak * (step + 1) as f64 / self.warmup as f64;
        }
        let span = self.steps.saturating_sub(self.warmup + 1).max(1) as f64;
        let progress = ((step - self.warmup) as f64 / span).min(1.0);
        let share = match self.kind {
            ScheduleKind::Constant => return self.peak,
            ScheduleKind::Cosine => 0.5 * (1.0 + libm::cos(std::f64::consts::PI * progress)),
            ScheduleKind::Linear => 1.0 - progress,
        };
        self.peak * (self.floor + (1.0 - self.floor) * share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(kind: ScheduleKind) -> Schedule {
        Schedule {
            kind,
            peak: 1.0,
            warmup: 4,
            steps: 14,
            floor: 0.1,
        }
    }

    #[test]
    fn warm_up_rises_to_the_peak() {
        let s = schedule(ScheduleKind::Cosine);
        let rates: Vec<f64> = (0..5).map(|step| s.lr(step)).collect();
        assert_eq!(rates, [0.25, 0.5, 0.75, 1.0, 1.0]);
    }

    #[test]
    fn decay_ends_at_the_floor_and_stays_there() {
        for kind in [ScheduleKind::Cosine, ScheduleKind::Linear] {
            let s = schedule(kind);
            assert!(
                (s.lr(13) - 0.1).abs() < 1e-12,
                "{kind:?} ends at {}",
                s.lr(13)
            );
            assert_eq!(s.lr(100), s.lr(13));
            assert!(
                (4..13).all(|step| s.lr(step) > s.lr(step + 1)),
                "{kind:?} falls"
            );
        }
        assert_eq!(schedule(ScheduleKind::Constant).lr(13), 1.0);
    }

    #[test]
    fn a_run_without_warm_up_or_with_one_step_has_a_rate() {
        let s = Schedule {
            warmup: 0,
            steps: 1,
            ..schedule(ScheduleKind::Linear)
        };
        assert_eq!(s.lr(0), 1.0);
    }
}
