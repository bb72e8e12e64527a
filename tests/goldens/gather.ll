define void @k_223aac1fb9f0ebdac8d3ba41(ptr %given) #0 {
entry:
  %v7 = alloca i64
  %v11 = alloca i64
  %bits = ptrtoint ptr %given to i64
  %odd = trunc i64 %bits to i1
  br i1 %odd, label %slice, label %start
start:
  call void @fs_run(ptr @k_223aac1fb9f0ebdac8d3ba41, ptr %given, i64 7, i64 560)
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
  %v15 = getelementptr i64, ptr %v2, i64 %v10
  %v16 = load i64, ptr %v15, align 8
  %v17 = icmp slt i64 %v16, 0
  %v18 = add i64 %v16, 10
  %v19 = select i1 %v17, i64 %v18, i64 %v16
  %v20 = icmp uge i64 %v19, 10
  br i1 %v20, label %fail, label %ok21, !prof !0
ok21:
  %v22 = mul i64 %v19, 16
  %v27 = mul i64 %v10, 16
  store i64 0, ptr %v11
  br label %loop12
loop12:
  %v14 = load i64, ptr %v11
  %v23 = add i64 %v14, %v22
  %v24 = getelementptr float, ptr %v4, i64 %v23
  %v25 = load <8 x float>, ptr %v24, align 4
  %v26 = fmul <8 x float> %v25, splat (float 0x4000000000000000)
  %v28 = add i64 %v27, %v14
  %v29 = getelementptr float, ptr %v6, i64 %v28
  store <8 x float> %v26, ptr %v29, align 4
  %v30 = add nsw i64 %v14, 8
  store i64 %v30, ptr %v11
  %v31 = icmp slt i64 %v30, 16
  br i1 %v31, label %loop12, label %done13
done13:
  %v32 = add nsw i64 %v10, 1
  store i64 %v32, ptr %v7
  %v33 = icmp slt i64 %v32, %end
  br i1 %v33, label %loop8, label %done9
done9:
  ret void
fail:
  %slot = getelementptr i64, ptr %args, i64 3
  %error = load ptr, ptr %slot, align 8
  store i64 1, ptr %error, align 8
  ret void
}
declare void @fs_run(ptr, ptr, i64, i64)
attributes #0 = { nounwind alignstack=32 }
attributes #1 = { nounwind willreturn memory(none) }
!0 = !{!"branch_weights", i32 1, i32 100000}
