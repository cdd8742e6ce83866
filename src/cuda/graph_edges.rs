//! What waits for what in a captured graph.
//!
//! A capture of one stream is a chain, each node waiting for the one before it. Where a program has calls for a lane beside the
//! main one, the chain's edges are replaced by those that the program needs, and read back.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ptr::null_mut;

use cudarc::driver::sys;

use super::device::Device;
use super::graph::Expected;
use super::lanes::Lane;
use crate::error::{CaptureError, DeviceError};

/// What has been issued to a graph.
#[derive(Default)]
pub(super) struct Issued {
    pub kernels: Expected,
    /// For each node its lane and the nodes that must have ended; empty where the order of capture stays.
    order: Vec<(Lane, Vec<usize>)>,
}

impl Issued {
    /// Kernels that run in the order of capture.
    pub(super) fn in_order_of_capture(kernels: Expected) -> Self {
        Issued {
            kernels,
            order: Vec::new(),
        }
    }

    /// Adds kernels that were captured last, up to node `nodes` of the graph, and run one after another once the nodes of
    /// `after` have ended. A library may have put nodes of other kinds before its own. Gives the last node, or `after` where
    /// there is none.
    pub(super) fn extend(
        &mut self,
        (kernels, nodes): (Expected, usize),
        lane: Lane,
        mut after: Vec<usize>,
    ) -> Vec<usize> {
        self.kernels.extend(kernels);
        for node in self.order.len()..nodes {
            self.order
                .push((lane, std::mem::replace(&mut after, vec![node])));
        }
        after
    }

    /// Whether anything may run beside the main lane.
    fn has_lanes(&self) -> bool {
        self.order.iter().any(|(lane, _)| *lane == Lane::Side)
    }

    /// The planned edges in ascending order.
    fn edges(&self) -> Vec<(usize, usize)> {
        let waits = self.order.iter().enumerate();
        let mut edges: Vec<(usize, usize)> = waits
            .flat_map(|(to, (_, after))| after.iter().map(move |&from| (from, to)))
            .collect();
        edges.sort_unstable();
        edges.dedup();
        edges
    }
}

/// The edges of a chain of so many nodes.
fn chain(nodes: usize) -> Vec<(usize, usize)> {
    (1..nodes).map(|to| (to - 1, to)).collect()
}

/// Nodes of the graph that the device's stream is capturing.
///
/// # Errors
/// What the driver says.
pub(super) fn nodes_so_far(device: &Device) -> Result<usize, DeviceError> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let mut graph = null_mut();
    // SAFETY: status and graph outlive the call; what else it could tell is not asked for.
    let result = unsafe {
        sys::cuStreamGetCaptureInfo_v3(
            device.stream(),
            &mut status,
            null_mut(),
            &mut graph,
            null_mut(),
            null_mut(),
            null_mut(),
        )
    };
    device.check("cuStreamGetCaptureInfo", result)?;
    let mut count = 0;
    // SAFETY: the stream is capturing this graph; a null list asks for the count, and `count` outlives the call.
    let result = unsafe { sys::cuGraphGetNodes(graph, null_mut(), &mut count) };
    device.check("cuGraphGetNodes", result).map(|()| count)
}

/// Gives a captured graph the edges of the plan, where there is more than one lane.
///
/// # Errors
/// Nodes that were not issued; edges that are not those of a chain before, or not the planned ones after; what the
/// driver says.
pub(super) fn arrange(
    device: &Device,
    graph: sys::CUgraph,
    nodes: &[sys::CUgraphNode],
    issued: &Issued,
) -> Result<(), CaptureError> {
    if !issued.has_lanes() {
        return Ok(());
    }
    if nodes.len() != issued.order.len() {
        return Err(CaptureError::Nodes {
            expected: issued.order.len(),
            found: nodes.len(),
        });
    }
    let (captured, planned) = (chain(nodes.len()), issued.edges());
    same(&captured, &edges_of(device, graph, nodes)?)?;
    let ends = |edges: &[(usize, usize)]| -> (Vec<_>, Vec<_>) {
        edges.iter().map(|&(a, b)| (nodes[a], nodes[b])).unzip()
    };
    let (from, to) = ends(&captured);
    // SAFETY: the nodes belong to the graph, which is not instantiated yet; no edge data means those that were just read:
    // edges that wait for the whole node.
    let status = unsafe {
        sys::cuGraphRemoveDependencies_v2(
            graph,
            from.as_ptr(),
            to.as_ptr(),
            std::ptr::null(),
            captured.len(),
        )
    };
    device.check("cuGraphRemoveDependencies", status)?;
    let (from, to) = ends(&planned);
    // SAFETY: as above.
    let status = unsafe {
        sys::cuGraphAddDependencies_v2(
            graph,
            from.as_ptr(),
            to.as_ptr(),
            std::ptr::null(),
            planned.len(),
        )
    };
    device.check("cuGraphAddDependencies", status)?;
    same(&planned, &edges_of(device, graph, nodes)?)?;
    Ok(())
}

/// Fails with the first edge that stands in one of two ascending lists alone.
fn same(expected: &[(usize, usize)], found: &[(usize, usize)]) -> Result<(), CaptureError> {
    let lacking = expected
        .iter()
        .find(|edge| found.binary_search(edge).is_err());
    let besides = found
        .iter()
        .find(|edge| expected.binary_search(edge).is_err());
    match lacking.or(besides) {
        None => Ok(()),
        Some(&(from, to)) => Err(CaptureError::Edge {
            from,
            to,
            planned: lacking.is_some(),
        }),
    }
}

/// The edges of a graph in ascending order, by the places of their nodes.
fn edges_of(
    device: &Device,
    graph: sys::CUgraph,
    nodes: &[sys::CUgraphNode],
) -> Result<Vec<(usize, usize)>, DeviceError> {
    let mut count = 0;
    // SAFETY: null lists ask for the count, and `count` outlives the call.
    let status =
        unsafe { sys::cuGraphGetEdges_v2(graph, null_mut(), null_mut(), null_mut(), &mut count) };
    device.check("cuGraphGetEdges", status)?;
    if count == 0 {
        return Ok(Vec::new());
    }
    let (mut from, mut to) = (vec![null_mut(); count], vec![null_mut(); count]);
    let plain = sys::CUgraphEdgeData_st {
        from_port: 0,
        to_port: 0,
        type_: 0,
        reserved: [0; 5],
    };
    let mut data = vec![plain; count];
    // SAFETY: the three lists have room for `count` edges.
    let status = unsafe {
        sys::cuGraphGetEdges_v2(
            graph,
            from.as_mut_ptr(),
            to.as_mut_ptr(),
            data.as_mut_ptr(),
            &mut count,
        )
    };
    device.check("cuGraphGetEdges", status)?;
    let places: BTreeMap<_, _> = nodes.iter().enumerate().map(|(i, &n)| (n, i)).collect();
    // An edge that waits for less than the whole node is not one of the plan's; neither is one of an unknown node.
    let place = |node: &sys::CUgraphNode| places.get(node).copied().unwrap_or(usize::MAX);
    let ends = from.iter().zip(&to).zip(&data);
    let mut edges: Vec<(usize, usize)> = ends
        .map(|((from, to), &data)| match data == plain {
            true => (place(from), place(to)),
            false => (usize::MAX, place(to)),
        })
        .collect();
    edges.sort_unstable();
    Ok(edges)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_of_one_call_wait_for_each_other_and_an_empty_call_hands_on() {
        let mut issued = Issued::default();
        let first = issued.extend((vec![None, None], 2), Lane::Main, vec![]);
        let empty = issued.extend((vec![], 2), Lane::Main, first.clone());
        assert_eq!((first, empty.clone()), (vec![1], vec![1]));
        assert!(!issued.has_lanes());
        // A library's kernel with a node of its own before it.
        let side = issued.extend((vec![None], 4), Lane::Side, empty.clone());
        let main = issued.extend((vec![None], 5), Lane::Main, empty);
        issued.extend((vec![None], 6), Lane::Main, [main, side].concat());
        assert!(issued.has_lanes());
        let edges = [(0, 1), (1, 2), (1, 4), (2, 3), (3, 5), (4, 5)];
        assert_eq!(issued.edges(), edges);
        assert_eq!(issued.kernels.len(), 5);
    }

    #[test]
    fn an_edge_too_few_or_too_many_is_named() {
        let edges = [(0, 1), (1, 2)];
        assert_eq!(same(&edges, &edges), Ok(()));
        let error = |from, to, planned| Err(CaptureError::Edge { from, to, planned });
        assert_eq!(same(&edges, &edges[..1]), error(1, 2, true));
        assert_eq!(same(&edges, &[(0, 1), (0, 2), (1, 2)]), error(0, 2, false));
        // What waits for a part of a node, or for a node that was not issued.
        assert_eq!(same(&edges, &[(0, 1), (usize::MAX, 2)]), error(1, 2, true));
    }
}
