#!/usr/bin/env bash
# Makes the tables of the READMEs anew, each after the tests of what it times.
#
#     bash recipes/measure.sh --list                every phase: GPUs, seconds at most, command
#     bash recipes/measure.sh FOLDER [PHASE ...]    the phases named, or all that this machine has the GPUs for
#
# FOLDER gets a log of each phase, tables and traces, and a line a phase in summary.txt as it ends. A phase that fails or
# takes too long does not keep the others from running; the status is 1 then. From the folder of the repository, in an
# environment with the package, pytest and, for the peers, flash-linear-attention and FlashQLA. PYTHON names the interpreter.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHON=${PYTHON:-python3}

phases() {
    local bench="-m hf_cp.bench" step="-m hf_cp.bench --table step --layer-code gluon" gdn="-m hf_cp.kernels.gdn.bench"
    local fused="-m hf_cp.kernels.a2a_gemm" run="-m torch.distributed.run --standalone --nproc-per-node"
    local curves="-m hf_cp.bench --table trajectory"

    # Right before fast.
    phase tests_gdn         1 300 -m pytest -q -m gpu tests/test_gdn_triton.py tests/test_segments.py
    phase tests_layer       1 200 -m pytest -q -m gpu tests/test_gdn_layer.py tests/test_gdn_backend.py tests/test_linear_cross_entropy.py
    phase tests_model       1 300 -m pytest -q -m gpu tests/test_kernels_across_ranks.py tests/test_peft.py tests/test_multimodal.py tests/test_parity.py
    phase tests_fused       1 200 -m pytest -q -m gpu tests/test_a2a_gemm_cuda.py tests/test_a2a_gemm_build.py
    phase tests_fused_ranks 2 120 $run 2 tests/a2a_gemm_ranks.py symmetric
    phase tests_fused_model 2 120 $run 2 tests/fused_model_ranks.py symmetric

    # kernels/gdn/README.md
    phase gdn               1 590 $gdn --backends flash_qla,gluon,triton,eager --out FOLDER/gdn.jsonl
    phase gdn_fla           1 590 $gdn --backends fla,gluon --tokens 8192,32768 --heads 16:32 --out FOLDER/gdn_fla.jsonl
    phase layer             1 300 $bench --layer-code gluon,triton,stock --tokens 8192,32768

    # recipes/README.md, one GPU
    phase step              1 200 $step,triton,stock --models 0.8B --tokens 8192
    phase step_32k          1 120 $step,triton --models 0.8B --tokens 32768
    phase step_liger        1 150 $step --models 0.8B --tokens 8192,32768 --liger
    phase step_compiled     1 300 $step --models 0.8B --tokens 8192,32768 --compile
    phase step_4b           1 150 $step --models 4B --tokens 8192,32768 --checkpointing full --liger
    phase step_longest      1 300 $step --models 0.8B --tokens 262144,longest --checkpointing full --precision mixed
    phase step_packed       1 200 $step --models 0.8B --tokens 131072 --documents 64 --checkpointing full --precision mixed
    phase step_lora         1 200 $step --models 0.8B,4B --tokens 8192,32768 --checkpointing off,full --lora 16

    # recipes/README.md, trajectories; processes that share a GPU, then one each
    phase curves_4          1 590 $run 4 $curves --steps 100 --modes p2p,ulysses --checkpointing off,full
    phase curves_8          1 590 $run 8 $curves --steps 200 --modes p2p
    phase curves_allgather  1 200 $run 4 $curves --steps 10 --modes allgather
    phase curves_repeated   1 590 $run 2 $curves --steps 200 --modes p2p --deterministic --repeat 2
    phase curves_nccl       2 400 $run 2 $curves --steps 100 --modes p2p,ulysses --checkpointing off,full
    phase curves_nccl_4     4 400 $run 4 $curves --steps 100 --modes p2p,ulysses --checkpointing off,full
    phase curves_nccl_8     8 590 $run 8 $curves --steps 200 --modes p2p,ulysses --checkpointing off,full

    # recipes/README.md, between GPUs
    local gpus
    for gpus in 2 4 8; do
        phase "layers_$gpus"     $gpus 200 $run $gpus $bench --layer-code gluon --modes p2p,allgather,ulysses --projection-backend torch,fused --local-tokens 8192,16384,32768 --profile FOLDER/traces
        phase "attention_$gpus"  $gpus 120 $run $gpus $bench --layer-code gluon --layer-type full --modes ulysses,allgather --projection-backend torch,fused --local-tokens 8192,16384
        phase "steps_$gpus"      $gpus 300 $run $gpus $step --models report --layers 4,8 --vocab 4096 --local-tokens 2048,4096,16384 --profile FOLDER/traces
        phase "steps_full_$gpus" $gpus 200 $run $gpus $step --models report --layers 4 --local-tokens 16384 --checkpointing off,full
    done

    # kernels/a2a_gemm/README.md
    phase fused             1 400 $fused.bench --sweep --json FOLDER/fused.json
    phase fused_clusters    1 300 $fused.bench --clusters 1,2 --json FOLDER/fused_clusters.json
    for gpus in 2 4 8; do
        phase "fused_$gpus"      $gpus 200 $run $gpus $fused.bench_ranks --copies 0 4 8 16 24 --json FOLDER/fused_$gpus.json
    done
}

list() { printf '%-18s %d %4d  %s\n' "$1" "$2" "$3" "${*:4}"; }

run() {
    local name=$1 gpus=$2 limit=$3 start=$SECONDS status=0
    shift 3
    local command=("${@//FOLDER/$folder}")
    if [[ "${command[*]}" == *"-m hf_cp.bench"* ]]; then command+=(--out "$folder/$name"); fi
    timeout --kill-after=10 "$limit" "$PYTHON" "${command[@]}" >"$folder/$name.log" 2>&1 </dev/null || status=$?
    if [[ $status != 0 ]]; then failed=1; fi
    printf '%-18s %4d s  status %3d  %s\n' "$name" $((SECONDS - start)) "$status" "${command[*]}" | tee -a "$folder/summary.txt"
}

if [[ "${1:-}" == --list ]]; then
    phase() { list "$@"; }
    phases
    exit
fi
folder=${1:?give a folder for the results, or --list}
shift
mkdir -p "$folder"
names=" $* " known=" " failed=0
phase() { known+="$1 "; }
phases
for name in "$@"; do
    if [[ "$known" != *" $name "* ]]; then
        echo "measure.sh: no phase is called $name: see --list" >&2
        exit 2
    fi
done
have=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())') || exit 2
phase() {
    if [[ "$names" == "  " ]] && ((have < $2)); then return; fi
    if [[ "$names" == "  " || "$names" == *" $1 "* ]]; then run "$@"; fi
}
phases
exit "$failed"
