define void @k_a407233d56518ac9691156d9(ptr %given) #0 {
entry:
  %v7 = alloca i64
  %v14 = alloca i64
  %v34 = alloca i64
  %bits = ptrtoint ptr %given to i64
  %odd = trunc i64 %bits to i1
  br i1 %odd, label %slice, label %start
start:
  call void @fs_run(ptr @k_a407233d56518ac9691156d9, ptr %given, i64 3, i64 75)
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
  %v11 = sub i64 5, 0
  %v12 = and i64 %v11, -8
  %v13 = add i64 0, %v12
  %v20 = mul i64 %v10, 5
  %v17 = icmp slt i64 0, %v13
  br i1 %v17, label %some18, label %done16
some18:
  store i64 0, ptr %v14
  br label %loop15
loop15:
  %v19 = load i64, ptr %v14
  %v21 = add i64 %v20, %v19
  %v22 = getelementptr float, ptr %v2, i64 %v21
  %v23 = load <8 x float>, ptr %v22, align 4
  %v24 = getelementptr float, ptr %v4, i64 %v19
  %v25 = load <8 x float>, ptr %v24, align 4
  %v26 = fadd <8 x float> %v23, %v25
  %v27 = fcmp ogt <8 x float> splat (float 0x0000000000000000), %v26
  %v28 = select <8 x i1> %v27, <8 x float> splat (float 0x0000000000000000), <8 x float> %v26
  %v29 = fcmp uno <8 x float> splat (float 0x0000000000000000), splat (float 0x0000000000000000)
  %v30 = select <8 x i1> %v29, <8 x float> splat (float 0x0000000000000000), <8 x float> %v28
  %v31 = getelementptr float, ptr %v6, i64 %v21
  store <8 x float> %v30, ptr %v31, align 4
  %v32 = add nsw i64 %v19, 8
  store i64 %v32, ptr %v14
  %v33 = icmp slt i64 %v32, %v13
  br i1 %v33, label %loop15, label %done16
done16:
  %v37 = icmp slt i64 %v13, 5
  br i1 %v37, label %some38, label %done36
some38:
  store i64 %v13, ptr %v34
  br label %loop35
loop35:
  %v39 = load i64, ptr %v34
  %v40 = sub i64 5, %v39
  %v41 = icmp slt i64 %v40, 8
  %v42 = select i1 %v41, i64 %v40, i64 8
  %v43 = trunc i64 %v42 to i16
  %v44 = insertelement <8 x i16> poison, i16 %v43, i64 0
  %v45 = shufflevector <8 x i16> %v44, <8 x i16> poison, <8 x i32> zeroinitializer
  %v46 = icmp ult <8 x i16> <i16 0, i16 1, i16 2, i16 3, i16 4, i16 5, i16 6, i16 7>, %v45
  %v47 = add i64 %v20, %v39
  %v48 = getelementptr float, ptr %v2, i64 %v47
  %v49 = call <8 x float> @llvm.masked.load.v8f32.p0(ptr %v48, i32 4, <8 x i1> %v46, <8 x float> zeroinitializer)
  %v50 = getelementptr float, ptr %v4, i64 %v39
  %v51 = call <8 x float> @llvm.masked.load.v8f32.p0(ptr %v50, i32 4, <8 x i1> %v46, <8 x float> zeroinitializer)
  %v52 = fadd <8 x float> %v49, %v51
  %v53 = fcmp ogt <8 x float> splat (float 0x0000000000000000), %v52
  %v54 = select <8 x i1> %v53, <8 x float> splat (float 0x0000000000000000), <8 x float> %v52
  %v55 = fcmp uno <8 x float> splat (float 0x0000000000000000), splat (float 0x0000000000000000)
  %v56 = select <8 x i1> %v55, <8 x float> splat (float 0x0000000000000000), <8 x float> %v54
  %v57 = getelementptr float, ptr %v6, i64 %v47
  call void @llvm.masked.store.v8f32.p0(<8 x float> %v56, ptr %v57, i32 4, <8 x i1> %v46)
  %v58 = add nsw i64 %v39, 8
  store i64 %v58, ptr %v34
  %v59 = icmp slt i64 %v58, 5
  br i1 %v59, label %loop35, label %done36
done36:
  %v60 = add nsw i64 %v10, 1
  store i64 %v60, ptr %v7
  %v61 = icmp slt i64 %v60, %end
  br i1 %v61, label %loop8, label %done9
done9:
  ret void
}
declare <8 x float> @llvm.masked.load.v8f32.p0(ptr, i32, <8 x i1>, <8 x float>)
declare void @llvm.masked.store.v8f32.p0(<8 x float>, ptr, i32, <8 x i1>)
declare void @fs_run(ptr, ptr, i64, i64)
attributes #0 = { nounwind alignstack=32 }
attributes #1 = { nounwind willreturn memory(none) }
!0 = !{!"branch_weights", i32 1, i32 100000}
