define void @k_54717944af71e2e1fb0e0a9c(ptr %given) #0 {
entry:
  %v5 = alloca i64
  %v9 = alloca i64
  %bits = ptrtoint ptr %given to i64
  %odd = trunc i64 %bits to i1
  br i1 %odd, label %slice, label %start
start:
  call void @fs_run(ptr @k_54717944af71e2e1fb0e0a9c, ptr %given, i64 1, i64 8192)
  ret void
slice:
  %facts = getelementptr i8, ptr %given, i64 -1
  %args = load ptr, ptr %facts, align 8
  %at.begin = getelementptr i64, ptr %facts, i64 1
  %begin = load i64, ptr %at.begin, align 8
  %at.end = getelementptr i64, ptr %facts, i64 2
  %end = load i64, ptr %at.end, align 8
  %v1 = getelementptr i64, ptr %args, i64 0
  %v2 = load ptr, ptr %v1, align 8
  %v3 = getelementptr i64, ptr %args, i64 1
  %v4 = load ptr, ptr %v3, align 8
  store i64 %begin, ptr %v5
  br label %loop6
loop6:
  %v8 = load i64, ptr %v5
  store i64 0, ptr %v9
  br label %loop10
loop10:
  %v12 = load i64, ptr %v9
  %v13 = getelementptr float, ptr %v2, i64 %v12
  %v14 = load <8 x float>, ptr %v13, align 4
  %v15 = fmul <8 x float> %v14, splat (float 0x3FE0000000000000)
  %v16 = fmul <8 x float> %v14, splat (float 0x3FE6A09E60000000)
  %v17 = fcmp olt <8 x float> splat (float 0x4010000000000000), %v16
  %v18 = select <8 x i1> %v17, <8 x float> splat (float 0x4010000000000000), <8 x float> %v16
  %v19 = fcmp ogt <8 x float> splat (float 0xC010000000000000), %v18
  %v20 = select <8 x i1> %v19, <8 x float> splat (float 0xC010000000000000), <8 x float> %v18
  %v21 = fmul <8 x float> %v20, %v20
  %v22 = call <8 x float> @llvm.fma.v8f32(<8 x float> splat (float 0x3EC0AA83C0000000), <8 x float> %v21, <8 x float> splat (float 0x3F32A63BA0000000))
  %v23 = call <8 x float> @llvm.fma.v8f32(<8 x float> %v22, <8 x float> %v21, <8 x float> splat (float 0x3F6FD023E0000000))
  %v24 = call <8 x float> @llvm.fma.v8f32(<8 x float> %v23, <8 x float> %v21, <8 x float> splat (float 0x3FAB302FE0000000))
  %v25 = call <8 x float> @llvm.fma.v8f32(<8 x float> %v24, <8 x float> %v21, <8 x float> splat (float 0x3FC8C627E0000000))
  %v26 = call <8 x float> @llvm.fma.v8f32(<8 x float> %v25, <8 x float> %v21, <8 x float> splat (float 0x3FF20DD740000000))
  %v27 = fmul <8 x float> %v20, %v26
  %v28 = call <8 x float> @llvm.fma.v8f32(<8 x float> splat (float 0x3F039E68E0000000), <8 x float> %v21, <8 x float> splat (float 0x3F536CB860000000))
  %v29 = call <8 x float> @llvm.fma.v8f32(<8 x float> %v28, <8 x float> %v21, <8 x float> splat (float 0x3F8F251220000000))
  %v30 = call <8 x float> @llvm.fma.v8f32(<8 x float> %v29, <8 x float> %v21, <8 x float> splat (float 0x3FBD87A2A0000000))
  %v31 = call <8 x float> @llvm.fma.v8f32(<8 x float> %v30, <8 x float> %v21, <8 x float> splat (float 0x3FE027CEC0000000))
  %v32 = call <8 x float> @llvm.fma.v8f32(<8 x float> %v31, <8 x float> %v21, <8 x float> splat (float 0x3FF0000000000000))
  %v33 = fdiv <8 x float> %v27, %v32
  %v34 = fcmp olt <8 x float> splat (float 0x3FF0000000000000), %v33
  %v35 = select <8 x i1> %v34, <8 x float> splat (float 0x3FF0000000000000), <8 x float> %v33
  %v36 = fcmp ogt <8 x float> splat (float 0xBFF0000000000000), %v35
  %v37 = select <8 x i1> %v36, <8 x float> splat (float 0xBFF0000000000000), <8 x float> %v35
  %v38 = fadd <8 x float> %v37, splat (float 0x3FF0000000000000)
  %v39 = fmul <8 x float> %v15, %v38
  %v40 = getelementptr float, ptr %v4, i64 %v12
  store <8 x float> %v39, ptr %v40, align 4
  %v41 = add nsw i64 %v12, 8
  store i64 %v41, ptr %v9
  %v42 = icmp slt i64 %v41, 512
  br i1 %v42, label %loop10, label %done11
done11:
  %v43 = add nsw i64 %v8, 1
  store i64 %v43, ptr %v5
  %v44 = icmp slt i64 %v43, %end
  br i1 %v44, label %loop6, label %done7
done7:
  ret void
}
declare <8 x float> @llvm.fma.v8f32(<8 x float>, <8 x float>, <8 x float>)
declare void @fs_run(ptr, ptr, i64, i64)
attributes #0 = { nounwind alignstack=32 }
attributes #1 = { nounwind willreturn memory(none) }
!0 = !{!"branch_weights", i32 1, i32 100000}
