"""What programs print when a training fails, by the class of the failure.

Taken from the sources of the programs, from their own runs, and from public reports; names,
numbers and paths are changed. `{rank}`, `{node}` and `{n}` are filled in. An exception of several
lines has them in one text.
"""

from collections.abc import Mapping, Sequence

BEHIND, KILLED = "collective_timeout", "killed"
"""All wait for one rank that is behind; a rank is killed without a word."""

RAISED: Mapping[str, Sequence[str]] = {
    "div_zero": ("ZeroDivisionError: division by zero",),
    "device_mismatch": (
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, "
        "cuda:{n} and cpu!",
    ),
    "python_exception": (
        "KeyError: 'tokens'",
        "IndexError: list index out of range",
        "TypeError: GPT.forward() got an unexpected keyword argument 'attention_mask'",
        "RuntimeError: The size of tensor a (4096) must match the size of tensor b (4095) at "
        "non-singleton dimension 1",
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x1024 and 4096x1024)",
        "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
        "UnicodeDecodeError: 'utf-8' codec can't decode byte 0x8b in position 1: invalid start byte",
        "mylib.errors.BadShard: shard 17 has no tokens",
        "AttributeError: 'NoneType' object has no attribute 'shape'",
        "RuntimeError: Trying to backward through the graph a second time (or directly access saved "
        "tensors after they have already been freed).",
    ),
    "assertion": (
        "AssertionError",
        "AssertionError: batch 12 is empty",
        "AssertionError: torch.Size([8, 1024]) != torch.Size([8, 1023])",
    ),
    "import_error": (
        "ModuleNotFoundError: No module named 'flash_attn'",
        "ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory",
        "ImportError: cannot import name 'builder' from 'google.protobuf.internal'",
        "ImportError: /opt/fa/flash_attn_2_cuda.cpython-312-x86_64-linux-gnu.so: undefined symbol: "
        "_ZN3c104cuda9SetDeviceEi",
    ),
    "gpu_oom": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU {n} has a total "
        "capacity of 79.15 GiB of which 1.2 GiB is free. Process 4711 has 77.9 GiB memory in use.",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported "
        "at some other API call, so the stacktrace below might be incorrect.",
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 1.10 GiB. GPU {n} has a total "
        "capacity of 63.98 GiB of which 12.00 MiB is free.",
    ),
    "host_oom": (
        "MemoryError",
        "OSError: [Errno 12] Cannot allocate memory",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't "
        "allocate memory: you tried to allocate 68719476736 bytes. Error code 12 (Cannot allocate memory)",
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 120. GiB for an array with shape "
        "(16106127360,) and data type float64",
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
    ),
    "cuda_error": (
        "RuntimeError: CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be "
        "asynchronously reported at some other API call, so the stacktrace below might be incorrect.\n"
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
        "torch.AcceleratorError: CUDA error: unspecified launch failure",
        "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa)`",
        "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
        "RuntimeError: CUDA error: misaligned address",
        "RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered",
    ),
    "device_assert": (
        "RuntimeError: CUDA error: device-side assert triggered",
        "torch.AcceleratorError: CUDA error: device-side assert triggered\nSearch for "
        "`cudaErrorAssert' in https://docs.nvidia.com/cuda/cuda-runtime-api/ for more information.",
    ),
    "cuda_driver": (
        "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        "RuntimeError: CUDA error: invalid device ordinal",
        "RuntimeError: No CUDA GPUs are available",
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
    ),
    "gpu_ecc": ("RuntimeError: CUDA error: uncorrectable ECC error encountered",),
    "nan": (
        "RuntimeError: Function 'MulBackward0' returned nan values in its 0th output.",
        "ValueError: loss is nan at step 4711",
        "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
        "AssertionError: Rank {rank}: found NaN in local forward loss calculation. Device: 2, node: {node}",
        "RuntimeError: Rank {rank}, node {node}, device 2, iteration 8: Unexpected result nan "
        "(message='found NaN in local forward loss calculation')",
        "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0",
        "FloatingPointError: Loss became infinite or NaN at iteration=8!",
        "ValueError: Detected nan and/or inf values in `layers.3.weight`. Check your forward pass for "
        "numerically unstable operations.",
    ),
    "missing_file": (
        "FileNotFoundError: [Errno 2] No such file or directory: '/data/shard_17.bin'",
        "OSError: [Errno 2] No such file or directory: '/data/vocab.json'",
        "OSError: meta-llama/Llama-9 is not a local folder and is not a valid model identifier listed on "
        "'https://huggingface.co/models'",
        "botocore.errorfactory.NoSuchKey: An error occurred (NoSuchKey) when calling the GetObject "
        "operation: The specified key does not exist.",
        "huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error. (Request ID: Root=1-6a)",
    ),
    "permission": (
        "PermissionError: [Errno 13] Permission denied: '/ckpt/step_40'",
        "huggingface_hub.errors.GatedRepoError: 403 Client Error. (Request ID: Root=1-6a)",
        "botocore.exceptions.ClientError: An error occurred (AccessDenied) when calling the PutObject "
        "operation: Access Denied",
        "botocore.exceptions.NoCredentialsError: Unable to locate credentials",
    ),
    "disk_full": (
        "OSError: [Errno 28] No space left on device: '/ckpt/step_40/1.pt'",
        "RuntimeError: [enforce fail at inline_container.cc:603] . unexpected pos 2752 vs 2646",
        "RuntimeError: PytorchStreamWriter failed writing file data/81: file write failed (No space left "
        "on device)",
    ),
    "quota": ("OSError: [Errno 122] Disk quota exceeded: '/home/u/out'",),
    "storage": (
        "OSError: [Errno 116] Stale file handle: '/nfs/ckpt'",
        "OSError: [Errno 5] Input/output error",
        "requests.exceptions.HTTPError: 503 Server Error: Service Unavailable for url: "
        "https://hub.example/model",
        "botocore.exceptions.ClientError: An error occurred (SlowDown) when calling the PutObject "
        "operation (reached max retries: 4): Please reduce your request rate.",
        "OSError: [Errno 108] Cannot send after transport endpoint shutdown",
        "huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests for url: "
        "https://huggingface.co/api/models",
    ),
    "network": (
        "socket.gaierror: [Errno -3] Temporary failure in name resolution",
        "ConnectionRefusedError: [Errno 111] Connection refused",
        "OSError: [Errno 113] No route to host",
        "requests.exceptions.ReadTimeout: HTTPSConnectionPool(host='api.wandb.ai', port=443): Read timed "
        "out. (read timeout=20)",
        "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find "
        "them in the cached files.",
    ),
    "data_loader": (
        "RuntimeError: DataLoader worker (pid 4711) exited unexpectedly with exit code 1.",
        "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed. ",
        "RuntimeError: DataLoader worker (pid(s) 4711, 4712) exited unexpectedly",
    ),
    "nccl_usage": (
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:317, invalid usage (run with "
        "NCCL_DEBUG=WARN for details), NCCL version 2.21.5\nncclInvalidUsage: This usually reflects "
        "invalid usage of NCCL library.\nLast error:\nDuplicate GPU detected : rank {rank} and rank 0 "
        "both on CUDA device 1a000",
    ),
    "corrupt_file": (
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
        "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge",
        "_pickle.UnpicklingError: pickle data was truncated",
        "pyarrow.lib.ArrowInvalid: Parquet magic bytes not found in footer.",
        "EOFError: Compressed file ended before the end-of-stream marker was reached",
    ),
    "checkpoint_mismatch": (
        "RuntimeError: Error(s) in loading state_dict for GPT:\n\tMissing key(s) in state_dict: "
        + ", ".join(f'"layers.{layer}.attention.query_key_value.weight"' for layer in range(90)),
        "RuntimeError: Error(s) in loading state_dict for LlamaForCausalLM:\n\tsize mismatch for "
        "model.embed_tokens.weight: copying a param with shape torch.Size([32000, 4096]) from checkpoint, "
        "the shape in current model is torch.Size([32001, 4096]).",
    ),
    "configuration": (
        "lightning.fabric.utilities.exceptions.MisconfigurationException: No supported gpu backend found!",
        "AssertionError: Check batch related parameters. train_batch_size is not equal to "
        "micro_batch_per_gpu * gradient_acc_step * world_size 32 != 2 * 1 * 64",
        "omegaconf.errors.ConfigAttributeError: Key 'lr' is not in struct",
        "hydra.errors.MissingConfigException: Cannot find primary config 'train'.",
        "ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable "
        "MASTER_ADDR expected, but not set",
        "RuntimeError: world_size (64) is not divisible by 24",
    ),
    "resource_limit": (
        "OSError: [Errno 24] Too many open files: '/data/shard_17.bin'",
        "RuntimeError: received 0 items of ancdata",
        "RuntimeError: can't start new thread",
        "BlockingIOError: [Errno 11] Resource temporarily unavailable",
    ),
    "collective_mismatch": (
        "RuntimeError: Detected mismatch between collectives on ranks. Rank {rank} is running collective: "
        "CollectiveFingerPrint(SequenceNumber=101, OpType=ALLGATHER, TensorShape=[1], TensorDtypes=Long, "
        "TensorDeviceTypes=TensorOptions(dtype=float (default), device=cuda, layout=Strided (default), "
        "requires_grad=false (default), pinned_memory=false (default), memory_format=(nullopt))), but Rank "
        "0 is running collective: CollectiveFingerPrint(SequenceNumber=0OpType=REDUCE).",
    ),
    "ddp_usage": (
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new "
        "one. This error indicates that your module has parameters that were not used in producing loss.",
        "RuntimeError: Expected to mark a variable ready only once. This error is caused by one of the "
        "following reasons: 1) Use of a module parameter outside the `forward` function.",
    ),
    "compile_error": (
        "torch._inductor.exc.InductorError: CalledProcessError: Command '['/usr/bin/gcc', '/tmp/main.c']' "
        "returned non-zero exit status 1.",
        "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:",
        "RuntimeError: Error building extension 'cpu_adam'",
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 264192, Hardware "
        "limit: 232448. Reducing block sizes or `num_stages` may help.",
    ),
    "silent_corruption": (
        "RuntimeError: Rank {rank}, node {node}, device 2, iteration #8: Possible transient error!!",
    ),
}
"""Classes that end a rank with an exception of its own."""

WRITTEN: Mapping[str, Sequence[str]] = {
    "segfault": (
        "Fatal Python error: Segmentation fault",
        "Segmentation fault (core dumped)",
        "double free or corruption (!prev)",
        "[{node}:4711:0:4711] Caught signal 11 (Segmentation fault: address not mapped to object at "
        "address 0x8)",
    ),
    "illegal_instruction": (
        "Illegal instruction (core dumped)",
        "Fatal Python error: Illegal instruction",
    ),
    "bus_error": (
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient "
        "shared memory (shm).",
        "Bus error (core dumped)",
        "Fatal Python error: Bus error",
    ),
    "arguments": (
        "train.py: error: unrecognized arguments: --lerning-rate 3",
        "pretrain_gpt.py: error: the following arguments are required: --micro-batch-size",
    ),
    "cuda_error": (
        "[rank{rank}]:[E314 14:33:46.588302933 ProcessGroupNCCL.cpp:1595] [PG ID 0 PG GUID 0(default_pg) "
        "Rank {rank}] Process group watchdog thread terminated with exception: CUDA error: an illegal memory "
        "access was encountered",
    ),
    "device_assert": (
        "../aten/src/ATen/native/cuda/Indexing.cu:1290: indexSelectLargeIndex: block: [{n},0,0], thread: "
        "[0,0,0] Assertion `srcIndex < srcSelectDimSize` failed.",
    ),
}
"""Classes for which the rank writes a plain line."""

OF_NODES: Mapping[str, Sequence[str]] = {
    "gpu_fault": (
        "NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, name=python, GPU has fallen off the bus.",
        "NVRM: Xid (PCI:0000:3b:00): 119, pid=4711, name=python, Timeout after 6s of waiting for "
        "RPC response from GPU3 GSP! Expected function 76 (GSP_RM_CONTROL)",
        "NVRM: GPU at PCI:0000:3b:00: GPU-1a2b has fallen off the bus. NVRM: GPU has fallen off the bus.",
        "NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x26:0xffff:1482)",
        "amdgpu 0000:c1:00.0: amdgpu: GPU reset begin!",
    ),
    "gpu_ecc": (
        "NVRM: Xid (PCI:0000:86:00): 48, pid=4711, name=python, DBE (double bit error) ECC error",
        "NVRM: Xid (PCI:0000:9b:00): 94, pid=4711, name=python3, Contained: SM (0x1). RST: No, D-RST: No",
        "NVRM: Xid (PCI:0000:9b:00): 95, pid=4711, name=python3, Uncontained: LTC TAG (0x2,0x0). RST: Yes",
    ),
    "nvlink": (
        "NVRM: Xid (PCI:0000:86:00): 74, pid=4711, name=python, NVLink: fatal error detected on link 4",
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Fatal, Link 44 egress non-posted PRIV error",
    ),
    "host_oom": (
        "Out of memory: Killed process 4711 (python) total-vm:1073741824kB, anon-rss:9kB",
        "Memory cgroup out of memory: Killed process 4711 (python) total-vm:107374kB, anon-rss:9kB",
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=x,task=python,pid=4711,uid=0",
    ),
    "network": (
        "mlx5_core 0000:86:00.0 ib2: Link down",
        "bond0: link status definitely down for interface ens1f0, disabling it",
        "NETDEV WATCHDOG: eth0 (ena): transmit queue 3 timed out 5012 ms",
        "ice 0000:31:00.0 ens1f0: NIC Link is Down",
    ),
    "kernel_fault": (
        "watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python:4711]",
        "Kernel panic - not syncing: Fatal hardware error!",
        "rcu: INFO: rcu_sched self-detected stall on CPU",
        "BUG: unable to handle page fault for address: ffffb3c0",
    ),
    "host_hardware": (
        "mce: [Hardware Error]: CPU 31: Machine Check Exception: 5 Bank 18: fe00000000801136",
        "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#0_DIMM#0 (channel:0 slot:0 page:0x1)",
        "pcieport 0000:00:01.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer",
    ),
    "storage": (
        "LustreError: 167-0: scratch-MDT0000-mdc-ffff88: This client was evicted by scratch-MDT0000; in "
        "progress operations using this service will fail.",
        "EXT4-fs error (device nvme0n1p2): ext4_find_entry:1455: inode #2: comm python: reading directory",
        "nvme nvme0: I/O 12 QID 3 timeout, reset controller",
        "nfs: server filer01 not responding, timed out",
    ),
    "segfault": (
        "python[4711]: segfault at 8 ip 00007f1e sp 00007ffd error 4 in libtorch_cuda.so[7f1e]",
    ),
}
"""Classes that the kernel of a node reports; the rank itself ends without a word, or in CUDA."""

OF_SCHEDULERS: Mapping[str, Sequence[str]] = {
    "time_limit": (
        "slurmstepd: error: *** JOB 4711 ON {node} CANCELLED AT 2026-11-02T03:11:11 DUE TO TIME LIMIT ***",
        "slurmstepd: error: *** STEP 4711.0 ON {node} CANCELLED AT 2026-11-02T03:11:11 DUE TO TIME LIMIT ***",
        "TERM_RUNLIMIT: job killed after reaching LSF run time limit.",
        "=>> PBS: job killed: walltime 86417 exceeded limit 86400",
        "Warning  DeadlineExceeded  2m  job-controller  Job was active longer than specified deadline",
    ),
    "preempted": (
        "slurmstepd: error: *** STEP 4711.0 ON {node} CANCELLED AT 2026-11-02T03:11:11 DUE TO PREEMPTION ***",
        "slurmstepd: error: *** JOB 4711 ON {node} CANCELLED AT 2026-11-02T03:11:11 DUE TO JOB REQUEUE ***",
        "Warning  Preempted  2m  default-scheduler  Preempted by pod 8d97-5210 on node {node}",
        "TaintManagerEviction: Marking for deletion Pod ml/llama-worker-3",
    ),
    "cancelled": (
        "slurmstepd: error: *** JOB 4711 ON {node} CANCELLED AT 2026-11-02T03:11:11 ***",
        "slurmstepd: error: *** JOB 4711 ON {node} CANCELLED AT 2026-11-02T03:11:11 BY root ***",
    ),
    "node_failed": (
        "slurmstepd: error: *** JOB 4711 ON {node} CANCELLED AT 2026-11-02T03:11:11 DUE TO NODE "
        "FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***",
        "srun: error: Node failure on {node}",
        "ORTE has lost communication with a remote daemon.",
        "Warning  NodeNotReady  2m  node-controller  Node is not ready",
    ),
    "unschedulable": (
        "Warning  FailedScheduling  2m  default-scheduler  0/9 nodes are available: 9 Insufficient "
        "nvidia.com/gpu. preemption: 0/9 nodes are available: 9 No preemption victims found",
        "srun: error: Unable to allocate resources: Requested node configuration is not available",
    ),
}
OF_LAUNCHERS: Mapping[str, Sequence[str]] = {
    "host_oom": (
        "slurmstepd: error: Detected 1 oom_kill event in StepId=4711.0. Some of the step tasks have been "
        "OOM Killed.",
        "srun: error: {node}: tasks 1-3: Out Of Memory",
        "    Reason:       OOMKilled",
        "slurmstepd: error: Detected 1 oom-kill event(s) in step 4711.0 cgroup. Some of your processes may "
        "have been killed by the cgroup out-of-memory handler.",
    ),
    "configuration": (
        "Warning  Failed  2m  kubelet  Error: ImagePullBackOff",
        "slurmstepd: error: pyxis: container start failed with error code: 1",
    ),
}
"""Lines of launchers that tell what happened, not to which rank."""

LOST: Sequence[str] = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[10.0.0.{n}]:4{n}. This is typically caused by a remote process that ended.",
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Read error "
    "[10.0.0.{n}]:4{n}: Connection reset by peer",
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:84] Timed out waiting "
    "1800000ms for recv operation to complete",
    "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/"
    "NCCLUtils.hpp:317, remote process exited or there was a network error, NCCL version 2.21.5\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
    "prematurely.\nLast error:\nsocketProgress: Connection closed by remote peer 10-0-0-{n}<4{n}>",
    "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/"
    "ProcessGroupNCCL.cpp:1269, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL "
    "version 2.21.5\nncclSystemError: System call (e.g. socket, malloc) or external library call failed "
    "or device error.\nLast error:\nsocketProgress: Connection closed by remote peer 10-0-0-{n}<4{n}>",
    "torch.distributed.elastic.multiprocessing.api.SignalException: Process {n} got signal: 15",
    "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
    "lightning.fabric.utilities.exceptions.SIGTERMException",
)
LOOKALIKES: Sequence[str] = (
    "EOFError",
    "BrokenPipeError: [Errno 32] Broken pipe",
    "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Terminated. ",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
)
"""What ends ranks that lost another, without reporting the loss."""
SLOW: Sequence[Sequence[str]] = (
    (
        "[rank{rank}]:[E1102 05:20:03.118859045 ProcessGroupNCCL.cpp:1746] [PG ID 0 PG GUID 0(default_pg) "
        "Rank {rank}] Received a dump signal due to a collective timeout from  rank 6 and we will try our "
        "best to dump the debug info.",
        "[rank{rank}]:[E1102 05:20:03.118963441 ProcessGroupNCCL.cpp:1536] [PG ID 0 PG GUID 0(default_pg) "
        "Rank {rank}] ProcessGroupNCCL preparing to dump debug info. Include stack trace: 1",
    ),
    (
        "[rank{rank}]:[F1102 05:28:03.1 ProcessGroupNCCL.cpp:1169] [PG 0 Rank {rank}] [PG 0 Rank {rank}] "
        "ProcessGroupNCCL's watchdog got stuck for 600 seconds without making progress in monitoring "
        "enqueued collectives.",
        "terminate called after throwing an instance of 'c10::DistBackendError'",
        "Fatal Python error: Aborted",
    ),
    (
        "gpu{n}:984:1357 [4] ib_plugin.c:1615 NCCL WARN NET/IB : Got completion from peer "
        "172.36.143.59<44206> with status=12 opcode=129 len=65536 vendor err 129 (Recv) localGid ::ffff:29",
        "gpu{n}:984:1357 [4] NCCL INFO transport/net.cc:1298 -> 6",
    ),
)
"""Lines of ranks that waited for another."""
NOISE: Sequence[str] = (
    "UserWarning: errors in the file are ignored (permission denied is retried)",
    "[W1102 03:11:11.000 socket.cpp:460] [c10d] could not connect yet, trying again",
    "loading checkpoint shard 3 of 12",
    "gpu7:984:1357 [4] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC",
    "INFO retry policy: 3 attempts, timeout after 30 s",
    "0 errors, 3 warnings in the dataset's index",
    "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 64, reducing to 32",
    "/usr/lib/python3.12/site-packages/torch/utils/data/dataloader.py:557: UserWarning: This DataLoader "
    "will create 16 worker processes in total. Our suggested max number of worker in current system is 8",
)
FIRST_LINES: Sequence[str] = (
    "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid your "
    "system being overloaded, please further tune the variable",
    "GPU available: True (cuda), used: True",
    "[2026-11-02 02:55:15,357] [INFO] [comm.py:652:init_distributed] Initializing TorchBackend in DeepSpeed "
    "with backend nccl",
    "using world size: 64, data-parallel size: 8, context-parallel size: 1, tensor-model-parallel size: 8",
    "> initializing torch distributed ...",
    "Error handling: restart on failure is on",
    "gpu7:984:984 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.7<0>",
)

HELD_OUT: Mapping[str, Sequence[tuple[str, str]]] = {
    "gpu_ecc": (
        (
            "R",
            "RuntimeError: transform: failed to synchronize: cudaErrorECCUncorrectable: uncorrectable ECC error encountered",
        ),
    ),
    "arguments": (("W", "main_pretrain.py: error: unrecognized arguments: --local-rank=1"),),
    "storage": (
        ("R", "RuntimeError: write(): fd 29 failed with Input/output error"),
        ("R", "OSError: [Errno 5] Input/output error: '/app/out'"),
    ),
    "disk_full": (
        (
            "R",
            "RuntimeError: [enforce fail at inline_container.cc:300] . unexpected pos 6057217600 vs 6057217496",
        ),
    ),
    "host_oom": (
        (
            "N",
            "Memory cgroup out of memory: Killed process 15617 (python3) total-vm:11892kB, anon-rss:4292kB, file-rss:3428kB",
        ),
        (
            "N",
            "Killed process 7748 (python) total-vm:12907828kB, anon-rss:11500204kB, file-rss:0kB",
        ),
        ("N", "python3 invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0"),
    ),
    "nvlink": (
        (
            "N",
            "NVRM: Xid (PCI:0019:01:00): 149, NETIR Fatal XC0 i0 Link -1 (0x000fe406 0x00000000 0x00000000)",
        ),
    ),
    "gpu_fault": (
        (
            "N",
            "NVRM: Xid (PCI:0000:cb:00): 109, pid=1797828, name=pt_main_thread, Ch 00000008, errorString CTX SWITCH TIMEOUT, Info 0x58005",
        ),
    ),
    "cuda_error": (
        (
            "N",
            "NVRM: Xid (PCI:0000:cb:00): 13, pid='<unknown>', name=<unknown>, Graphics SM Warp Exception on (GPC 7, TPC 7, SM 0): Illegal Instruction Parameter",
        ),
        (
            "R",
            "RuntimeError: cublas runtime error : the GPU program failed to execute at /pytorch/aten/src/THC/THCBlas.cu:259",
        ),
        (
            "R",
            "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n, k)`",
        ),
        (
            "W",
            "ERROR (nnet3-train[5.4]:CopyToVec():cu-vector.cc:899) cudaError_t 4 : \"unspecified launch failure\" returned from 'cudaMemcpy(dst->Data(), this->data_)'",
        ),
    ),
    "network": (
        (
            "R",
            "urllib3.exceptions.MaxRetryError: HTTPSConnectionPool(host='s3.amazonaws.com', port=443): Max retries exceeded with url: /datasets/text.py",
        ),
        ("R", "TimeoutError: [Errno 110] Connection timed out"),
        ("R", "TimeoutError: The read operation timed out"),
        ("R", "socket.timeout: timed out"),
        (
            "R",
            "ConnectionError: Couldn't reach https://raw.githubusercontent.com/datasets/1.2.1/race.py",
        ),
        (
            "R",
            "requests.exceptions.ConnectionError: ('Connection aborted.', RemoteDisconnected('Remote end closed connection without response'))",
        ),
    ),
    "nan": (("R", "AssertionError: Nan grad norm occurs, please check it"),),
    "kernel_fault": (("N", "kernel BUG at lib/list_debug.c:51!"),),
    "host_hardware": (("N", "Uhhuh. NMI received for unknown reason 21 on CPU 0."),),
}
"""Lines that were collected after the rules were last changed, and with which they are scored.

Before each stands who writes it: R an exception of a rank, W a line of a rank, N the kernel of a
node, S a scheduler, L a launcher.
"""
