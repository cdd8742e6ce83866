//! cuBLASLt as a provider of matrix products, admitted by bits.
//!
//! The library's float order is not documented, so nothing is believed: a candidate serves only after
//! its output was equal, bit for bit, to the engine's own kernel on the step's own operands.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::cublaslt::sys as lt;
use cudarc::driver::sys;

use super::device::Device;
use super::exclusive;
use crate::error::DeviceError;
use crate::shape::{DType, Math};

/// Candidates asked for at most; each costs a few runs and a digest before the first replay.
const MOST_CANDIDATES: usize = 12;

/// Bytes that the addresses of operands are a multiple of: what the library takes for granted unless it
/// is told otherwise.
pub const ALIGNMENT: u32 = 256;

/// One product in the library's column-major terms: `D[m, n] = op(A) · op(B) (+ bias over m)`, perhaps
/// as a strided batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LtShape {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub transpose_a: bool,
    pub transpose_b: bool,
    pub lda: usize,
    pub ldb: usize,
    pub ldd: usize,
    pub bias: bool,
    /// How products are computed, and with it what A and B are stored as.
    pub math: Math,
    /// What D is stored as; a bias is always f32.
    pub output: DType,
    /// Whether the product is added to what D holds.
    pub add: bool,
    /// Bytes that the addresses of A, B and D are a multiple of, at most 256.
    pub alignment: u32,
    pub batch: usize,
    /// Elements from one product of the batch to the next, of A, B and D.
    pub strides: [usize; 3],
}

/// Device addresses of one product's operands.
#[derive(Clone, Copy, Debug)]
pub struct LtOperands {
    pub a: sys::CUdeviceptr,
    pub b: sys::CUdeviceptr,
    pub bias: sys::CUdeviceptr,
    pub d: sys::CUdeviceptr,
    pub workspace: sys::CUdeviceptr,
}

/// An algorithm with its whole configuration.
#[derive(Clone, Copy)]
pub struct Algorithm {
    algo: lt::cublasLtMatmulAlgo_t,
    workspace_bytes: usize,
    /// Id, tile, stages, cluster and the other numbers that name the configuration.
    config: [u32; 8],
}

impl Algorithm {
    /// The configuration as the manifest's execution section lists it.
    pub fn describe(&self) -> String {
        let [
            id,
            tile,
            stages,
            swizzle,
            custom,
            mma_shape,
            cluster,
            split_k,
        ] = self.config;
        format!(
            "cublasLt id {id} tile {tile} stages {stages} swizzle {swizzle} custom {custom} \
             mma {mma_shape} cluster {cluster} split-k {split_k} workspace {}",
            self.workspace_bytes
        )
    }
}

/// The library, opened on one device.
pub struct Lt {
    device: Arc<Device>,
    handle: lt::cublasLtHandle_t,
    /// The library's own version number.
    pub version: usize,
}

// SAFETY: the handle may be used from any thread, as cuBLASLt documents.
unsafe impl Send for Lt {}
// SAFETY: as above; every method takes the handle by value.
unsafe impl Sync for Lt {}

impl Lt {
    /// Opens the library where it is installed; `None` where it is not.
    ///
    /// # Errors
    /// A library that is there and cannot be opened.
    pub fn open(device: &Arc<Device>) -> Result<Option<Lt>, DeviceError> {
        // SAFETY: only looks whether the library can be loaded.
        if !unsafe { lt::is_culib_present() } {
            return Ok(None);
        }
        device.bind()?;
        let mut handle = std::ptr::null_mut();
        let _aside = exclusive::aside();
        // SAFETY: the library is there, and `handle` outlives the call.
        let status = unsafe { lt::cublasLtCreate(&mut handle) };
        check(device, "cublasLtCreate", status)?;
        // SAFETY: the library is there.
        let version = unsafe { lt::cublasLtGetVersion() };
        Ok(Some(Lt {
            device: device.clone(),
            handle,
            version,
        }))
    }

    /// Algorithms without split-K and with a workspace of at most `workspace_bytes` that the library offers for a shape, the
    /// one it thinks best first.
    ///
    /// # Errors
    /// What the library says, except that it offers none: that is an empty list.
    pub fn candidates(
        &self,
        shape: &LtShape,
        workspace_bytes: usize,
    ) -> Result<Vec<Algorithm>, DeviceError> {
        self.device.bind()?;
        let product = Descriptors::new(&self.device, shape, 0)?;
        let preference = Preference::new(&self.device, shape.alignment, workspace_bytes)?;
        // SAFETY: an array of plain results; the library fills the first `found`.
        let mut results: [lt::cublasLtMatmulHeuristicResult_t; MOST_CANDIDATES] =
            unsafe { std::mem::zeroed() };
        let mut found = 0;
        // SAFETY: descriptors and preference live until after the call, and the array has room.
        let status = unsafe {
            lt::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                product.operation,
                product.a,
                product.b,
                product.d,
                product.d,
                preference.0,
                MOST_CANDIDATES as i32,
                results.as_mut_ptr(),
                &mut found,
            )
        };
        // A bias in f32 for a narrower output is a combination that some versions do not have.
        let none = [
            lt::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
            lt::cublasStatus_t::CUBLAS_STATUS_INVALID_VALUE,
        ];
        if none.contains(&status) {
            return Ok(Vec::new());
        }
        check(&self.device, "cublasLtMatmulAlgoGetHeuristic", status)?;
        let usable = |r: &&lt::cublasLtMatmulHeuristicResult_t| {
            r.state == lt::cublasStatus_t::CUBLAS_STATUS_SUCCESS
                && r.workspaceSize <= workspace_bytes
        };
        let algorithms = results[..found as usize].iter().filter(usable);
        let algorithms = algorithms.map(|r| Algorithm {
            algo: r.algo,
            workspace_bytes: r.workspaceSize,
            config: config_of(&r.algo),
        });
        // A split-K of 0 or 1 is none.
        Ok(algorithms.filter(|a| a.config[7] <= 1).collect())
    }

    /// Issues one product to the device's stream.
    ///
    /// # Errors
    /// What the library says.
    pub fn launch(
        &self,
        shape: &LtShape,
        algorithm: &Algorithm,
        operands: &LtOperands,
    ) -> Result<(), DeviceError> {
        self.device.bind()?;
        let product = Descriptors::new(&self.device, shape, operands.bias)?;
        let (alpha, beta) = (1.0f32, if shape.add { 1.0f32 } else { 0.0f32 });
        let address = |a: sys::CUdeviceptr| a as *const c_void;
        // SAFETY: the operands are addresses inside the arena with the shapes the descriptors give,
        // checked when the call was planned; descriptors live until after the call; the workspace has
        // as many bytes as were allowed when the algorithm was asked for; host scalars are read before the call returns.
        let status = unsafe {
            lt::cublasLtMatmul(
                self.handle,
                product.operation,
                std::ptr::from_ref(&alpha).cast(),
                address(operands.a),
                product.a,
                address(operands.b),
                product.b,
                std::ptr::from_ref(&beta).cast(),
                address(operands.d),
                product.d,
                operands.d as *mut c_void,
                product.d,
                &algorithm.algo,
                operands.workspace as *mut c_void,
                algorithm.workspace_bytes,
                self.device.stream().cast(),
            )
        };
        check(&self.device, "cublasLtMatmul", status)
    }
}

impl Drop for Lt {
    fn drop(&mut self) {
        let _ = self.device.bind();
        let _ = self.device.synchronize();
        let _aside = exclusive::aside();
        // SAFETY: the handle came from cublasLtCreate, and nothing issued with it runs any more.
        let _ = unsafe { lt::cublasLtDestroy(self.handle) };
    }
}

fn check(
    device: &Device,
    call: &'static str,
    status: lt::cublasStatus_t,
) -> Result<(), DeviceError> {
    match status {
        lt::cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
        other => Err(DeviceError::Driver {
            device: device.label(),
            call,
            text: format!("{other:?}"),
        }),
    }
}

fn config_of(algo: &lt::cublasLtMatmulAlgo_t) -> [u32; 8] {
    use lt::cublasLtMatmulAlgoConfigAttributes_t as Config;
    let attributes = [
        Config::CUBLASLT_ALGO_CONFIG_ID,
        Config::CUBLASLT_ALGO_CONFIG_TILE_ID,
        Config::CUBLASLT_ALGO_CONFIG_STAGES_ID,
        Config::CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING,
        Config::CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION,
        Config::CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID,
        Config::CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID,
        Config::CUBLASLT_ALGO_CONFIG_SPLITK_NUM,
    ];
    attributes.map(|attribute| {
        let (mut value, mut written) = (0u32, 0usize);
        // SAFETY: `value` has room for the four (or two) bytes that these attributes have.
        let status = unsafe {
            lt::cublasLtMatmulAlgoConfigGetAttribute(
                algo,
                attribute,
                std::ptr::from_mut(&mut value).cast(),
                4,
                &mut written,
            )
        };
        // Shape ids are two bytes, which a request for four refuses.
        if status != lt::cublasStatus_t::CUBLAS_STATUS_SUCCESS {
            // SAFETY: as above.
            let _ = unsafe {
                lt::cublasLtMatmulAlgoConfigGetAttribute(
                    algo,
                    attribute,
                    std::ptr::from_mut(&mut value).cast(),
                    2,
                    &mut written,
                )
            };
        }
        value
    })
}

/// The library's descriptions of one product; destroyed when dropped.
struct Descriptors {
    operation: lt::cublasLtMatmulDesc_t,
    a: lt::cublasLtMatrixLayout_t,
    b: lt::cublasLtMatrixLayout_t,
    d: lt::cublasLtMatrixLayout_t,
}

impl Descriptors {
    fn new(device: &Device, s: &LtShape, bias: sys::CUdeviceptr) -> Result<Self, DeviceError> {
        use lt::cublasLtMatmulDescAttributes_t as Attribute;
        let mut made = Descriptors {
            operation: std::ptr::null_mut(),
            a: std::ptr::null_mut(),
            b: std::ptr::null_mut(),
            d: std::ptr::null_mut(),
        };
        let f32_type = lt::cudaDataType::CUDA_R_32F;
        // SAFETY: the descriptor outlives the call; `Drop` destroys it.
        let status = unsafe {
            lt::cublasLtMatmulDescCreate(&mut made.operation, compute_of(s.math), f32_type)
        };
        check(device, "cublasLtMatmulDescCreate", status)?;
        made.set(
            device,
            Attribute::CUBLASLT_MATMUL_DESC_TRANSA,
            &i32::from(s.transpose_a),
        )?;
        made.set(
            device,
            Attribute::CUBLASLT_MATMUL_DESC_TRANSB,
            &i32::from(s.transpose_b),
        )?;
        if s.bias {
            let epilogue = lt::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32;
            made.set(device, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
            made.set(device, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)?;
            // Unless it is told, the library takes a bias to be stored as D is.
            if s.output != DType::F32 {
                let attribute = Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE;
                made.set(device, attribute, &(f32_type as i32))?;
            }
        }
        let sides = |transpose: bool, rows, cols| {
            if transpose {
                (cols, rows)
            } else {
                (rows, cols)
            }
        };
        let a = sides(s.transpose_a, s.m, s.k);
        let b = sides(s.transpose_b, s.k, s.n);
        let factors = type_of(device, s.math.storage())?;
        let output = type_of(device, s.output)?;
        made.a = layout(device, (factors, a), s.lda, (s.batch, s.strides[0]))?;
        made.b = layout(device, (factors, b), s.ldb, (s.batch, s.strides[1]))?;
        let d = (s.m, s.n);
        made.d = layout(device, (output, d), s.ldd, (s.batch, s.strides[2]))?;
        Ok(made)
    }

    fn set<T>(
        &self,
        device: &Device,
        attribute: lt::cublasLtMatmulDescAttributes_t,
        value: &T,
    ) -> Result<(), DeviceError> {
        // SAFETY: the descriptor is alive, and the value has the size that is given.
        let status = unsafe {
            lt::cublasLtMatmulDescSetAttribute(
                self.operation,
                attribute,
                std::ptr::from_ref(value).cast(),
                size_of::<T>(),
            )
        };
        check(device, "cublasLtMatmulDescSetAttribute", status)
    }
}

/// How the library computes what a domain asks for: f32 accumulators, whatever the factors.
fn compute_of(math: Math) -> lt::cublasComputeType_t {
    match math {
        Math::Tf32 => lt::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
        Math::F32 | Math::Bf16 | Math::F16 => lt::cublasComputeType_t::CUBLAS_COMPUTE_32F,
    }
}

/// The library's name of an element type.
fn type_of(device: &Device, dtype: DType) -> Result<lt::cudaDataType, DeviceError> {
    match dtype {
        DType::F32 => Ok(lt::cudaDataType::CUDA_R_32F),
        DType::Bf16 => Ok(lt::cudaDataType::CUDA_R_16BF),
        DType::F16 => Ok(lt::cudaDataType::CUDA_R_16F),
        other => Err(DeviceError::Driver {
            device: device.label(),
            call: "cublasLtMatrixLayoutCreate",
            text: format!("no product is stored as {other}"),
        }),
    }
}

fn layout(
    device: &Device,
    (dtype, (rows, cols)): (lt::cudaDataType, (usize, usize)),
    ld: usize,
    (batch, stride): (usize, usize),
) -> Result<lt::cublasLtMatrixLayout_t, DeviceError> {
    use lt::cublasLtMatrixLayoutAttribute_t as Attribute;
    let mut made = std::ptr::null_mut();
    // SAFETY: the layout outlives the call; `Descriptors` destroys it.
    let status = unsafe {
        lt::cublasLtMatrixLayoutCreate(&mut made, dtype, rows as u64, cols as u64, ld as i64)
    };
    check(device, "cublasLtMatrixLayoutCreate", status)?;
    if batch > 1 {
        let (count, stride) = (batch as i32, stride as i64);
        // SAFETY: the layout is alive, and each value has the size that is given.
        let status = unsafe {
            lt::cublasLtMatrixLayoutSetAttribute(
                made,
                Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                std::ptr::from_ref(&count).cast(),
                4,
            )
        };
        check(device, "cublasLtMatrixLayoutSetAttribute", status)?;
        // SAFETY: as above.
        let status = unsafe {
            lt::cublasLtMatrixLayoutSetAttribute(
                made,
                Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                std::ptr::from_ref(&stride).cast(),
                8,
            )
        };
        check(device, "cublasLtMatrixLayoutSetAttribute", status)?;
    }
    Ok(made)
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: each was created by the library or is null, which is skipped.
        unsafe {
            for layout in [self.a, self.b, self.d] {
                if !layout.is_null() {
                    let _ = lt::cublasLtMatrixLayoutDestroy(layout);
                }
            }
            if !self.operation.is_null() {
                let _ = lt::cublasLtMatmulDescDestroy(self.operation);
            }
        }
    }
}

/// No reduction scheme, so no split-K that adds partial sums; a workspace of at most our own.
struct Preference(lt::cublasLtMatmulPreference_t);

impl Preference {
    fn new(device: &Device, alignment: u32, workspace_bytes: usize) -> Result<Self, DeviceError> {
        use lt::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let mut made = std::ptr::null_mut();
        // SAFETY: the preference outlives the call; `Drop` destroys it.
        let status = unsafe { lt::cublasLtMatmulPreferenceCreate(&mut made) };
        check(device, "cublasLtMatmulPreferenceCreate", status)?;
        let made = Preference(made);
        let scheme = Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK;
        made.set(device, scheme, &0u32)?;
        let most = Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        made.set(device, most, &(workspace_bytes as u64))?;
        if alignment < ALIGNMENT {
            for operand in [
                Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
            ] {
                made.set(device, operand, &alignment)?;
            }
        }
        Ok(made)
    }

    fn set<T>(
        &self,
        device: &Device,
        attribute: lt::cublasLtMatmulPreferenceAttributes_t,
        value: &T,
    ) -> Result<(), DeviceError> {
        // SAFETY: the preference is alive, and the value has the size that is given.
        let status = unsafe {
            lt::cublasLtMatmulPreferenceSetAttribute(
                self.0,
                attribute,
                std::ptr::from_ref(value).cast(),
                size_of::<T>(),
            )
        };
        check(device, "cublasLtMatmulPreferenceSetAttribute", status)
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: created by the library.
        let _ = unsafe { lt::cublasLtMatmulPreferenceDestroy(self.0) };
    }
}
