//! A recipe set in motion: plan, parameters, data and schedule around a trainer.

use std::sync::Arc;

use super::hyper::Hyper;
use super::init::{Adapted, Adapters, FreshInit, ParamSource};
use super::recurrent::Start;
use super::schedule::{Schedule, ScheduleKind};
use super::session::LoadError;
use super::step::{Observe, StepReport};
use super::trainer::Trainer;
use crate::backend::Backend;
use crate::data::{Batch, DataConfig, DataLoader, SourceKind, TokenFormat, WindowOrder};
use crate::error::{CheckpointError, ConfigError, Error, Expected, Found};
use crate::io::model_folder::ModelFolder;
use crate::io::nf4_folder::companions;
use crate::io::peft::AdapterFolder;
use crate::io::recipe::{self, DataSource, Recipe, TokenDtype};
use crate::model::Model;
use crate::model::lora::PEFT_PREFIX;
use crate::plan::{
    CHUNK_LOGITS, GROWTH_INTERVAL, Passes, Plan, PlanConfig, RESTORED_ELEMENTS, StepForm, Stored,
};

/// A training run.
pub struct Run<B: Backend> {
    pub recipe: Recipe,
    pub trainer: Trainer<B>,
    pub loader: DataLoader,
    pub schedule: Schedule,
    /// How the sequences of the next step begin, once it was said to the session.
    start: Option<Start>,
}

impl<B: Backend> Run<B> {
    /// Plans the recipe, allocates on `backend`, and loads or draws the parameters.
    ///
    /// # Errors
    /// Whatever in recipe, data, model folder or device does not fit.
    pub fn open(recipe: Recipe, backend: B) -> Result<Self, Error> {
        let mut run = Run::allocate(recipe, backend)?;
        run.load_parameters()?;
        Ok(run)
    }

    /// The first half of [`Run::open`]: plans, opens the data and allocates, with every parameter zero.
    ///
    /// # Errors
    /// Whatever in recipe, data or device does not fit.
    pub fn allocate(recipe: Recipe, backend: B) -> Result<Self, Error> {
        let plan = Arc::new(plan_of(&recipe)?);
        Run::allocate_planned(recipe, plan, backend)
    }

    /// As [`Run::open`], with the recipe's plan made before.
    ///
    /// # Errors
    /// As [`Run::open`].
    pub fn open_planned(recipe: Recipe, plan: Arc<Plan>, backend: B) -> Result<Self, Error> {
        let mut run = Run::allocate_planned(recipe, plan, backend)?;
        run.load_parameters()?;
        Ok(run)
    }

    fn allocate_planned(recipe: Recipe, plan: Arc<Plan>, backend: B) -> Result<Self, Error> {
        let loader = DataLoader::open(&data_config(&recipe)?)?;
        let hyper = hyper_of(&recipe);
        let trainer = Trainer::new(backend, plan, hyper, recipe.warmup_steps)?;
        let schedule = schedule_of(&recipe);
        Ok(Run {
            recipe,
            trainer,
            loader,
            schedule,
            start: None,
        })
    }

    /// The second half of [`Run::open`]: loads or draws the parameters.
    ///
    /// # Errors
    /// Whatever in the model folder does not fit; a device fault.
    pub fn load_parameters(&mut self) -> Result<(), Error> {
        let seed = self.recipe.seed;
        match self.recipe.model_folder() {
            None => match self.trainer.load(&FreshInit { seed }) {
                Ok(()) => Ok(()),
                Err(LoadError::Source(never)) => match never {},
                Err(LoadError::Step(error)) => Err(error.into()),
            },
            Some(folder) => {
                let base = &ModelFolder::open(&folder)?;
                let folder = adapter_of(&self.recipe)?;
                let fresh = Adapters::Fresh(FreshInit { seed });
                let adapters = folder.as_ref().map_or(fresh, Adapters::Folder);
                load_adapted(&mut self.trainer, &Adapted { base, adapters })
            }
        }
    }

    /// The root over the parameters after a step for which the recipe asks for it, `digest.every`.
    ///
    /// # Errors
    /// As [`Session::root`](super::session::Session::root).
    pub fn root_after(&mut self, report: &StepReport) -> Result<Option<blake3::Hash>, Error> {
        let taken = report.step + 1;
        match self.recipe.digest.every {
            Some(every) if taken.is_multiple_of(every) => {
                Ok(Some(self.trainer.session_mut().root()?))
            }
            _ => Ok(None),
        }
    }

    /// The next step of the run: its batch and its learning rate follow from the steps taken.
    ///
    /// # Errors
    /// As the trainer's; nothing has moved.
    pub fn step(&mut self, observer: Option<&mut dyn Observe<B>>) -> Result<StepReport, Error> {
        let batch = self.next_batch()?;
        Ok(self.trainer.step_observed(&batch, observer)?)
    }

    /// The batch of the next step, for which the rate is set and is said how its sequences begin.
    fn next_batch(&mut self) -> Result<Batch, Error> {
        let step = self.trainer.session().progress().taken;
        let batch = self.loader.batch_at(step)?;
        self.start_as(match self.loader.goes_on(step) {
            true => Start::Carried,
            false => Start::Fresh,
        })?;
        self.trainer.set_lr(self.schedule.lr(step));
        Ok(batch)
    }

    /// Says how the sequences begin, where there is a state to carry and it was not said already.
    fn start_as(&mut self, start: Start) -> Result<(), Error> {
        let plan = self.trainer.session().plan();
        if plan.inputs.carried.is_some() && self.start != Some(start) {
            let starts = vec![start; plan.config.batch];
            self.trainer.session_mut().set_starts(&starts)?;
            self.start = Some(start);
        }
        Ok(())
    }

    /// Forgets what was said to the session, whose bytes have been overwritten.
    pub(super) fn forget_start(&mut self) {
        self.start = None;
    }

    /// The next pass of the next step, where `data.micro_batch` splits steps; the report of the step when it was the
    /// last. Without a split this is the step.
    ///
    /// # Errors
    /// As [`Run::step`].
    pub fn pass(&mut self) -> Result<Option<StepReport>, Error> {
        let batch = self.next_batch()?;
        Ok(self.trainer.pass(&batch)?)
    }

    /// Loss and hits over the validation split.
    ///
    /// # Errors
    /// A recipe that sets nothing aside; data that cannot be read; a device fault.
    pub fn validate(&mut self) -> Result<Validation, Error> {
        self.validate_first(u64::MAX)
    }

    /// Loss and hits over the first `most` batches of the validation split.
    ///
    /// # Errors
    /// As [`Run::validate`].
    pub fn validate_first(&mut self, most: u64) -> Result<Validation, Error> {
        let data = &self.recipe.data;
        let (batch, seq_len) = (data.batch, data.seq_len);
        // Each window of validation is a sequence of its own.
        self.start_as(Start::Fresh)?;
        let batches = self.loader.validation_batches(batch, seq_len)?;
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        let mut found = Validation::default();
        for batch in batches.take(most) {
            found.add(&mut self.trainer, &batch?)?;
        }
        Ok(found)
    }

    /// Loss and hits on the data set aside, where the recipe asks for them after this step:
    /// `evaluation.every` and the last step. Training goes on with the bits it would have had.
    ///
    /// # Errors
    /// As [`Run::validate`].
    pub fn validation_after(&mut self, report: &StepReport) -> Result<Option<Validation>, Error> {
        let section = &self.recipe.evaluation;
        let taken = report.step + 1;
        let last = taken == self.recipe.steps;
        match section.every {
            Some(every) if last || taken.is_multiple_of(every) => {
                let most = section.batches.unwrap_or(u64::MAX);
                Ok(Some(self.validate_first(most)?))
            }
            _ => Ok(None),
        }
    }

    /// The sum of squares of each parameter's gradient in the step just taken, where the recipe asks
    /// for it: `metrics.group_norms_every`.
    ///
    /// # Errors
    /// A device fault.
    pub fn grad_squares_after(&mut self, report: &StepReport) -> Result<Option<Vec<f64>>, Error> {
        match self.recipe.metrics.group_norms_every {
            Some(every) if (report.step + 1).is_multiple_of(every) => {
                Ok(Some(self.trainer.session_mut().grad_squares()?))
            }
            _ => Ok(None),
        }
    }
}

/// What was found over several batches, each weighted by its scored targets.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Validation {
    loss_sum: f64,
    /// Scored targets whose logit is the row's maximum.
    pub hits: usize,
    /// Targets that were scored.
    pub scored: usize,
}

impl Validation {
    /// Evaluates one more batch; one without a scored target adds nothing.
    ///
    /// # Errors
    /// A batch that does not fit; a device fault.
    pub fn add<B: Backend>(
        &mut self,
        trainer: &mut Trainer<B>,
        batch: &Batch,
    ) -> Result<(), Error> {
        if batch.active_targets() == 0 {
            return Ok(());
        }
        let found = trainer.evaluate(batch)?;
        self.loss_sum += f64::from(found.loss) * found.scored as f64;
        self.hits += found.hits;
        self.scored += found.scored;
        Ok(())
    }

    /// The mean loss over the scored targets, in nats.
    pub fn loss(&self) -> f64 {
        self.loss_sum / self.scored.max(1) as f64
    }

    /// `exp(loss)`.
    pub fn perplexity(&self) -> f64 {
        libm::exp(self.loss())
    }

    /// The share of scored targets whose logit is the row's maximum.
    pub fn accuracy(&self) -> f64 {
        self.hits as f64 / self.scored.max(1) as f64
    }
}

/// The plan of a recipe.
///
/// # Errors
/// A model folder that cannot be read; sizes an op does not support.
pub fn plan_of(recipe: &Recipe) -> Result<Plan, Error> {
    let model = model_of(recipe)?;
    recipe.check_positions()?;
    Ok(Plan::build(model.as_ref(), plan_config(recipe))?)
}

/// The plan of a recipe's backbone alone: features and the gradient of what comes out are the caller's.
///
/// # Errors
/// [`ConfigError::Value`] for a family that has no such form; as [`plan_of`].
pub fn backbone_plan_of(recipe: &Recipe) -> Result<Plan, Error> {
    let config = recipe.model_config()?;
    let model = config.backbone().ok_or_else(|| ConfigError::Value {
        file: format!("the backbone of {}", recipe.name),
        key: "model.family",
        expected: Expected::OneOf(&["mamba"]),
        found: Found::Text(config.family().to_owned()),
    })?;
    Ok(Plan::build(model.as_ref(), plan_config(recipe))?)
}

/// The model of a recipe.
///
/// # Errors
/// A model folder whose configuration cannot be used; adapters beside a family that has none.
pub fn model_of(recipe: &Recipe) -> Result<Box<dyn Model>, ConfigError> {
    let config = recipe.model_config()?;
    let adapted = config.adapted(recipe.lora.config(), recipe.file())?;
    match recipe.data.windows {
        WindowOrder::Shuffled => Ok(adapted),
        WindowOrder::Consecutive => config.over_consecutive_windows(recipe.file()),
    }
}

fn plan_config(recipe: &Recipe) -> PlanConfig {
    PlanConfig {
        batch: recipe.data.batch,
        seq_len: recipe.data.seq_len,
        grain: recipe.data.grain,
        piece_tokens: recipe.data.piece_tokens,
        beta1: recipe.optimizer.beta1,
        beta2: recipe.optimizer.beta2,
        eps: recipe.optimizer.eps,
        math: recipe.precision.math(),
        growth_interval: recipe.precision.growth_interval.unwrap_or(GROWTH_INTERVAL),
        chunk_logits: CHUNK_LOGITS,
        restored_elements: RESTORED_ELEMENTS,
        form: form_of(recipe),
    }
}

/// How a recipe wants its steps carried out.
fn form_of(recipe: &Recipe) -> StepForm {
    let micro = recipe.data.micro_batch.filter(|&n| n < recipe.data.batch);
    StepForm {
        passes: micro.map_or(Passes::Whole, |sequences| Passes::Micro { sequences }),
        recompute: recipe.memory.form(),
    }
}

/// The data of a recipe.
///
/// # Errors
/// A model folder whose configuration cannot be used.
pub fn data_config(recipe: &Recipe) -> Result<DataConfig, ConfigError> {
    let data = &recipe.data;
    Ok(DataConfig {
        source: match data.source {
            DataSource::Sums => SourceKind::Sums,
            DataSource::Text => SourceKind::Text,
            DataSource::Bin | DataSource::Llmc => SourceKind::Bin,
        },
        path: data.path.as_deref().map(|p| recipe.resolve(p)),
        tokenizer: match data.tokenizer.as_str() {
            "bytes" => None,
            path => Some(recipe.resolve(path).display().to_string()),
        },
        token_format: match (data.source, data.token_dtype) {
            (DataSource::Llmc, _) => TokenFormat::LlmC,
            (_, Some(TokenDtype::U32)) => TokenFormat::U32,
            (_, Some(TokenDtype::U16) | None) => TokenFormat::U16,
        },
        validation: data.validation,
        batch: data.batch,
        seq_len: data.seq_len,
        seed: recipe.seed,
        vocab_size: recipe.model_config()?.vocab_size(),
        order: data.windows,
    })
}

/// The hyperparameters of a recipe.
pub fn hyper_of(recipe: &Recipe) -> Hyper {
    let o = &recipe.optimizer;
    Hyper {
        lr: o.lr,
        beta1: o.beta1,
        beta2: o.beta2,
        eps: o.eps,
        weight_decay: o.weight_decay,
        clip_norm: (o.clip_norm > 0.0).then_some(o.clip_norm),
        spike_norm: o.spike_norm,
    }
}

fn schedule_of(recipe: &Recipe) -> Schedule {
    Schedule {
        kind: match recipe.schedule.kind {
            recipe::ScheduleKind::Constant => ScheduleKind::Constant,
            recipe::ScheduleKind::Cosine => ScheduleKind::Cosine,
            recipe::ScheduleKind::Linear => ScheduleKind::Linear,
        },
        peak: recipe.optimizer.lr,
        warmup: recipe.schedule.warmup,
        steps: recipe.steps,
        floor: recipe.schedule.floor,
    }
}

/// The adapters that a recipe trains on, if it names some.
fn adapter_of(recipe: &Recipe) -> Result<Option<AdapterFolder>, CheckpointError> {
    let (Some(path), Some(lora)) = (&recipe.lora.adapter, recipe.lora.config()) else {
        return Ok(None);
    };
    let folder = AdapterFolder::open(&recipe.resolve(path))?;
    folder.check_scale(&lora)?;
    Ok(Some(folder))
}

/// The names of the tensors that a plan has a place for.
fn used_names(plan: &Plan) -> Vec<String> {
    let mut names: Vec<String> = plan.params.iter().map(|p| p.name.clone()).collect();
    let packed = plan.params.iter();
    let packed = packed.filter(|p| matches!(p.stored, Stored::Packed { .. }));
    names.extend(packed.flat_map(|p| companions(&p.name)));
    names
}

/// Fills a trainer's parameters from a folder; every tensor of the folder must be used.
///
/// # Errors
/// A missing, unexpected or misshapen tensor; a device fault.
pub fn load_folder<B: Backend>(
    trainer: &mut Trainer<B>,
    folder: &ModelFolder,
) -> Result<(), Error> {
    let plan = trainer.session().plan().clone();
    let names = used_names(&plan);
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    folder.check_all_used(&names)?;
    fill(trainer, folder)
}

/// Fills a trainer's parameters from a source that fails as files do.
fn fill<B: Backend>(
    trainer: &mut Trainer<B>,
    source: &impl ParamSource<Error = CheckpointError>,
) -> Result<(), Error> {
    match trainer.load(source) {
        Ok(()) => Ok(()),
        Err(LoadError::Source(error)) => Err(error.into()),
        Err(LoadError::Step(error)) => Err(error.into()),
    }
}

/// Fills a trainer's parameters from the folder of a base and its adapters, if it has some, from
/// theirs or afresh; every tensor of a folder must be used.
///
/// # Errors
/// As [`load_folder`]; an adapter for another base is known by its tensors' names or shapes.
pub fn load_adapted<B: Backend>(
    trainer: &mut Trainer<B>,
    folders: &Adapted<'_>,
) -> Result<(), Error> {
    let plan = trainer.session().plan().clone();
    let names = used_names(&plan);
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    folders.base.check_all_used(&names)?;
    if let Adapters::Folder(adapter) = &folders.adapters {
        let trained = plan.params.iter().filter(|p| p.state.is_some());
        let whole = trained.map(|p| format!("{PEFT_PREFIX}{}", p.name));
        let whole: Vec<String> = whole.collect();
        let whole = whole.iter().map(String::as_str);
        let places: Vec<&str> = names.iter().copied().chain(whole).collect();
        adapter.check_all_used(&places)?;
    }
    fill(trainer, folders)
}
