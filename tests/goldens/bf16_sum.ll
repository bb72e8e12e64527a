define void @k_4698530fbc51a036aff5b734(ptr %given) #0 {
entry:
  %v5 = alloca i64
  %v16 = alloca i64
  %v22 = alloca <32 x double>
  %v23 = alloca <32 x float>
  %v24 = alloca i64
  %v31 = alloca i64
  %v70 = alloca i64
  %v83 = alloca <32 x double>
  %v84 = alloca <32 x float>
  %v85 = alloca i64
  %v92 = alloca i64
  %bits = ptrtoint ptr %given to i64
  %odd = trunc i64 %bits to i1
  br i1 %odd, label %slice, label %start
start:
  call void @fs_run(ptr @k_4698530fbc51a036aff5b734, ptr %given, i64 2, i64 48080)
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
  %v9 = mul i64 %v8, 32
  %v10 = add i64 %v9, 32
  %v11 = icmp slt i64 %v10, 40
  %v12 = select i1 %v11, i64 %v10, i64 40
  %v13 = sub i64 %v12, %v9
  %v14 = and i64 %v13, -32
  %v15 = add i64 %v9, %v14
  %v19 = icmp slt i64 %v9, %v15
  br i1 %v19, label %some20, label %done18
some20:
  store i64 %v9, ptr %v16
  br label %loop17
loop17:
  %v21 = load i64, ptr %v16
  store <32 x double> splat (double 0x0000000000000000), ptr %v22
  store <32 x float> splat (float 0x0000000000000000), ptr %v23
  store i64 0, ptr %v24
  br label %loop25
loop25:
  %v27 = load i64, ptr %v24
  %v28 = add i64 %v27, 16
  %v29 = icmp slt i64 %v28, 300
  %v30 = select i1 %v29, i64 %v28, i64 300
  store i64 %v27, ptr %v31
  br label %loop32
loop32:
  %v34 = load i64, ptr %v31
  %v35 = mul i64 %v34, 40
  %v36 = add i64 %v21, %v35
  %v37 = getelementptr i16, ptr %v2, i64 %v36
  %v38 = load <32 x i16>, ptr %v37, align 2
  %v39 = zext <32 x i16> %v38 to <32 x i32>
  %v40 = shl <32 x i32> %v39, splat (i32 16)
  %v41 = bitcast <32 x i32> %v40 to <32 x float>
  %v42 = fmul <32 x float> %v41, %v41
  %v43 = load <32 x float>, ptr %v23
  %v44 = call <32 x float> @llvm.fma.v32f32(<32 x float> %v41, <32 x float> %v41, <32 x float> %v43)
  store <32 x float> %v44, ptr %v23
  %v45 = add nsw i64 %v34, 1
  store i64 %v45, ptr %v31
  %v46 = icmp slt i64 %v45, %v30
  br i1 %v46, label %loop32, label %done33
done33:
  %v47 = load <32 x float>, ptr %v23
  %v48 = load <32 x double>, ptr %v22
  %v49 = fpext <32 x float> %v47 to <32 x double>
  %v50 = fadd <32 x double> %v48, %v49
  store <32 x double> %v50, ptr %v22
  store <32 x float> splat (float 0x0000000000000000), ptr %v23
  %v51 = add nsw i64 %v27, 16
  store i64 %v51, ptr %v24
  %v52 = icmp slt i64 %v51, 300
  br i1 %v52, label %loop25, label %done26
done26:
  %v53 = load <32 x double>, ptr %v22
  %v54 = fptrunc <32 x double> %v53 to <32 x float>
  %v55 = bitcast <32 x float> %v54 to <32 x i32>
  %v56 = lshr <32 x i32> %v55, splat (i32 16)
  %v57 = and <32 x i32> %v56, splat (i32 1)
  %v58 = add <32 x i32> %v57, splat (i32 32767)
  %v59 = add <32 x i32> %v55, %v58
  %v60 = fcmp uno <32 x float> %v54, %v54
  %v61 = select <32 x i1> %v60, <32 x i32> splat (i32 2143289344), <32 x i32> %v59
  %v62 = lshr <32 x i32> %v61, splat (i32 16)
  %v63 = trunc <32 x i32> %v62 to <32 x i16>
  %v64 = zext <32 x i16> %v63 to <32 x i32>
  %v65 = shl <32 x i32> %v64, splat (i32 16)
  %v66 = bitcast <32 x i32> %v65 to <32 x float>
  %v67 = getelementptr i16, ptr %v4, i64 %v21
  store <32 x i16> %v63, ptr %v67, align 2
  %v68 = add nsw i64 %v21, 32
  store i64 %v68, ptr %v16
  %v69 = icmp slt i64 %v68, %v15
  br i1 %v69, label %loop17, label %done18
done18:
  %v73 = icmp slt i64 %v15, %v12
  br i1 %v73, label %some74, label %done72
some74:
  store i64 %v15, ptr %v70
  br label %loop71
loop71:
  %v75 = load i64, ptr %v70
  %v76 = sub i64 %v12, %v75
  %v77 = icmp slt i64 %v76, 32
  %v78 = select i1 %v77, i64 %v76, i64 32
  %v79 = trunc i64 %v78 to i8
  %v80 = insertelement <32 x i8> poison, i8 %v79, i64 0
  %v81 = shufflevector <32 x i8> %v80, <32 x i8> poison, <32 x i32> zeroinitializer
  %v82 = icmp ult <32 x i8> <i8 0, i8 1, i8 2, i8 3, i8 4, i8 5, i8 6, i8 7, i8 8, i8 9, i8 10, i8 11, i8 12, i8 13, i8 14, i8 15, i8 16, i8 17, i8 18, i8 19, i8 20, i8 21, i8 22, i8 23, i8 24, i8 25, i8 26, i8 27, i8 28, i8 29, i8 30, i8 31>, %v81
  store <32 x double> splat (double 0x0000000000000000), ptr %v83
  store <32 x float> splat (float 0x0000000000000000), ptr %v84
  store i64 0, ptr %v85
  br label %loop86
loop86:
  %v88 = load i64, ptr %v85
  %v89 = add i64 %v88, 16
  %v90 = icmp slt i64 %v89, 300
  %v91 = select i1 %v90, i64 %v89, i64 300
  store i64 %v88, ptr %v92
  br label %loop93
loop93:
  %v95 = load i64, ptr %v92
  %v96 = mul i64 %v95, 40
  %v97 = add i64 %v75, %v96
  %v98 = getelementptr i16, ptr %v2, i64 %v97
  %v99 = call <32 x i16> @llvm.masked.load.v32i16.p0(ptr %v98, i32 2, <32 x i1> %v82, <32 x i16> zeroinitializer)
  %v100 = zext <32 x i16> %v99 to <32 x i32>
  %v101 = shl <32 x i32> %v100, splat (i32 16)
  %v102 = bitcast <32 x i32> %v101 to <32 x float>
  %v103 = fmul <32 x float> %v102, %v102
  %v104 = load <32 x float>, ptr %v84
  %v105 = call <32 x float> @llvm.fma.v32f32(<32 x float> %v102, <32 x float> %v102, <32 x float> %v104)
  store <32 x float> %v105, ptr %v84
  %v106 = add nsw i64 %v95, 1
  store i64 %v106, ptr %v92
  %v107 = icmp slt i64 %v106, %v91
  br i1 %v107, label %loop93, label %done94
done94:
  %v108 = load <32 x float>, ptr %v84
  %v109 = load <32 x double>, ptr %v83
  %v110 = fpext <32 x float> %v108 to <32 x double>
  %v111 = fadd <32 x double> %v109, %v110
  store <32 x double> %v111, ptr %v83
  store <32 x float> splat (float 0x0000000000000000), ptr %v84
  %v112 = add nsw i64 %v88, 16
  store i64 %v112, ptr %v85
  %v113 = icmp slt i64 %v112, 300
  br i1 %v113, label %loop86, label %done87
done87:
  %v114 = load <32 x double>, ptr %v83
  %v115 = fptrunc <32 x double> %v114 to <32 x float>
  %v116 = bitcast <32 x float> %v115 to <32 x i32>
  %v117 = lshr <32 x i32> %v116, splat (i32 16)
  %v118 = and <32 x i32> %v117, splat (i32 1)
  %v119 = add <32 x i32> %v118, splat (i32 32767)
  %v120 = add <32 x i32> %v116, %v119
  %v121 = fcmp uno <32 x float> %v115, %v115
  %v122 = select <32 x i1> %v121, <32 x i32> splat (i32 2143289344), <32 x i32> %v120
  %v123 = lshr <32 x i32> %v122, splat (i32 16)
  %v124 = trunc <32 x i32> %v123 to <32 x i16>
  %v125 = zext <32 x i16> %v124 to <32 x i32>
  %v126 = shl <32 x i32> %v125, splat (i32 16)
  %v127 = bitcast <32 x i32> %v126 to <32 x float>
  %v128 = getelementptr i16, ptr %v4, i64 %v75
  call void @llvm.masked.store.v32i16.p0(<32 x i16> %v124, ptr %v128, i32 2, <32 x i1> %v82)
  %v129 = add nsw i64 %v75, 32
  store i64 %v129, ptr %v70
  %v130 = icmp slt i64 %v129, %v12
  br i1 %v130, label %loop71, label %done72
done72:
  %v131 = add nsw i64 %v8, 1
  store i64 %v131, ptr %v5
  %v132 = icmp slt i64 %v131, %end
  br i1 %v132, label %loop6, label %done7
done7:
  ret void
}
declare <32 x float> @llvm.fma.v32f32(<32 x float>, <32 x float>, <32 x float>)
declare <32 x i16> @llvm.masked.load.v32i16.p0(ptr, i32, <32 x i1>, <32 x i16>)
declare void @llvm.masked.store.v32i16.p0(<32 x i16>, ptr, i32, <32 x i1>)
declare void @fs_run(ptr, ptr, i64, i64)
attributes #0 = { nounwind alignstack=32 }
attributes #1 = { nounwind willreturn memory(none) }
!0 = !{!"branch_weights", i32 1, i32 100000}
