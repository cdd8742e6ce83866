//! Files: recipes, safetensors and Hugging Face model folders.

pub(crate) mod atomic;
pub mod checkpoint;
mod mamba_json;
pub mod model_folder;
mod model_json;
pub mod nf4_folder;
pub mod peft;
pub mod recipe;
mod recipe_check;
mod recipe_form;
mod recipe_keys;
mod recipe_record;
pub mod tensors;
mod tensors_header;
mod tensors_write;

pub use model_folder::{ModelFolder, write_model_folder};
pub use peft::{AdapterFolder, write_adapter_folder};
pub use recipe::Recipe;
pub use tensors::{StoredType, TensorEntry, TensorFile};
pub use tensors_write::{F32Tensor, write_f32_tensors};
