//! The worker side: lease, fence, enqueue.
