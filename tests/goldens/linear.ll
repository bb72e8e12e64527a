define void @k_7bf3967dd66f1713297d12d1(ptr %given) #0 {
entry:
  %v7 = alloca i64
  %v11 = alloca i64
  %bits = ptrtoint ptr %given to i64
  %odd = trunc i64 %bits to i1
  br i1 %odd, label %slice, label %start
start:
  call void @fs_run(ptr @k_7bf3967dd66f1713297d12d1, ptr %given, i64 8, i64 3200)
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
  %v15 = mul i64 %v10, 80
  store i64 0, ptr %v11
  br label %loop12
loop12:
  %v14 = load i64, ptr %v11
  %v16 = add i64 %v15, %v14
  %v17 = getelementptr float, ptr %v2, i64 %v16
  %v18 = load <8 x float>, ptr %v17, align 4
  %v19 = getelementptr float, ptr %v4, i64 %v14
  %v20 = load <8 x float>, ptr %v19, align 4
  %v21 = fadd <8 x float> %v18, %v20
  %v22 = fcmp ogt <8 x float> splat (float 0x0000000000000000), %v21
  %v23 = select <8 x i1> %v22, <8 x float> splat (float 0x0000000000000000), <8 x float> %v21
  %v24 = fcmp uno <8 x float> splat (float 0x0000000000000000), splat (float 0x0000000000000000)
  %v25 = select <8 x i1> %v24, <8 x float> splat (float 0x0000000000000000), <8 x float> %v23
  %v26 = getelementptr float, ptr %v6, i64 %v16
  store <8 x float> %v25, ptr %v26, align 4
  %v27 = add nsw i64 %v14, 8
  store i64 %v27, ptr %v11
  %v28 = icmp slt i64 %v27, 80
  br i1 %v28, label %loop12, label %done13
done13:
  %v29 = add nsw i64 %v10, 1
  store i64 %v29, ptr %v7
  %v30 = icmp slt i64 %v29, %end
  br i1 %v30, label %loop8, label %done9
done9:
  ret void
}
declare void @fs_run(ptr, ptr, i64, i64)
attributes #0 = { nounwind alignstack=32 }
attributes #1 = { nounwind willreturn memory(none) }
!0 = !{!"branch_weights", i32 1, i32 100000}
