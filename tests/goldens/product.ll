define void @k_096aa66ebf316e5af76f79a7(ptr %given) #0 {
entry:
  %v7 = alloca i64
  %v11 = alloca i64
  %v15 = alloca <16 x float>
  %v16 = alloca i64
  %bits = ptrtoint ptr %given to i64
  %odd = trunc i64 %bits to i1
  br i1 %odd, label %slice, label %start
start:
  call void @fs_run(ptr @k_096aa66ebf316e5af76f79a7, ptr %given, i64 4, i64 2176)
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
  %v5 = getelementptr i64, ptr %args, i64 2
  %v6 = load ptr, ptr %v5, align 8
  store i64 %begin, ptr %v7
  br label %loop8
loop8:
  %v10 = load i64, ptr %v7
  %v20 = mul i64 %v10, 8
  %v40 = mul i64 %v10, 16
  store i64 0, ptr %v11
  br label %loop12
loop12:
  %v14 = load i64, ptr %v11
  store <16 x float> splat (float 0x0000000000000000), ptr %v15
  store i64 0, ptr %v16
  br label %loop17
loop17:
  %v19 = load i64, ptr %v16
  %v21 = add i64 %v20, %v19
  %v22 = getelementptr float, ptr %v2, i64 %v21
  %v23 = load float, ptr %v22, align 4
  %v24 = mul i64 %v19, 16
  %v25 = add i64 %v14, %v24
  %v26 = getelementptr float, ptr %v4, i64 %v25
  %v27 = load <16 x float>, ptr %v26, align 4
  %v28 = insertelement <16 x float> poison, float %v23, i64 0
  %v29 = shufflevector <16 x float> %v28, <16 x float> poison, <16 x i32> zeroinitializer
  %v30 = fmul <16 x float> %v29, %v27
  %v31 = load <16 x float>, ptr %v15
  %v32 = call <16 x float> @llvm.fma.v16f32(<16 x float> %v29, <16 x float> %v27, <16 x float> %v31)
  store <16 x float> %v32, ptr %v15
  %v33 = add nsw i64 %v19, 1
  store i64 %v33, ptr %v16
  %v34 = icmp slt i64 %v33, 8
  br i1 %v34, label %loop17, label %done18
done18:
  %v35 = load <16 x float>, ptr %v15
  %v36 = fcmp ogt <16 x float> splat (float 0x0000000000000000), %v35
  %v37 = select <16 x i1> %v36, <16 x float> splat (float 0x0000000000000000), <16 x float> %v35
  %v38 = fcmp uno <16 x float> splat (float 0x0000000000000000), splat (float 0x0000000000000000)
  %v39 = select <16 x i1> %v38, <16 x float> splat (float 0x0000000000000000), <16 x float> %v37
  %v41 = add i64 %v40, %v14
  %v42 = getelementptr float, ptr %v6, i64 %v41
  store <16 x float> %v39, ptr %v42, align 4
  %v43 = add nsw i64 %v14, 16
  store i64 %v43, ptr %v11
  %v44 = icmp slt i64 %v43, 16
  br i1 %v44, label %loop12, label %done13
done13:
  %v45 = add nsw i64 %v10, 1
  store i64 %v45, ptr %v7
  %v46 = icmp slt i64 %v45, %end
  br i1 %v46, label %loop8, label %done9
done9:
  ret void
}
declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)
declare void @fs_run(ptr, ptr, i64, i64)
attributes #0 = { nounwind alignstack=32 }
attributes #1 = { nounwind willreturn memory(none) }
!0 = !{!"branch_weights", i32 1, i32 100000}
