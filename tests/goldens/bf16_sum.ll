define void @k_a46bfd1b6dc7fc0742bbffce(ptr %given) #0 {
entry:
  %v5 = alloca i64
  %v16 = alloca i64
  %v22 = alloca <32 x double>
  %v23 = alloca <32 x float>
  %v24 = alloca i64
  %v31 = alloca i64
  %v79 = alloca i64
  %v92 = alloca <32 x double>
  %v93 = alloca <32 x float>
  %v94 = alloca i64
  %v101 = alloca i64
  %bits = ptrtoint ptr %given to i64
  %odd = trunc i64 %bits to i1
  br i1 %odd, label %slice, label %start
start:
  call void @fs_run(ptr @k_a46bfd1b6dc7fc0742bbffce, ptr %given, i64 2, i64 48080)
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
  %v68 = bitcast <32 x float> %v66 to <32 x i32>
  %v69 = lshr <32 x i32> %v68, splat (i32 16)
  %v70 = and <32 x i32> %v69, splat (i32 1)
  %v71 = add <32 x i32> %v70, splat (i32 32767)
  %v72 = add <32 x i32> %v68, %v71
  %v73 = fcmp uno <32 x float> %v66, %v66
  %v74 = select <32 x i1> %v73, <32 x i32> splat (i32 2143289344), <32 x i32> %v72
  %v75 = lshr <32 x i32> %v74, splat (i32 16)
  %v76 = trunc <32 x i32> %v75 to <32 x i16>
  store <32 x i16> %v76, ptr %v67, align 2
  %v77 = add nsw i64 %v21, 32
  store i64 %v77, ptr %v16
  %v78 = icmp slt i64 %v77, %v15
  br i1 %v78, label %loop17, label %done18
done18:
  %v82 = icmp slt i64 %v15, %v12
  br i1 %v82, label %some83, label %done81
some83:
  store i64 %v15, ptr %v79
  br label %loop80
loop80:
  %v84 = load i64, ptr %v79
  %v85 = sub i64 %v12, %v84
  %v86 = icmp slt i64 %v85, 32
  %v87 = select i1 %v86, i64 %v85, i64 32
  %v88 = trunc i64 %v87 to i8
  %v89 = insertelement <32 x i8> poison, i8 %v88, i64 0
  %v90 = shufflevector <32 x i8> %v89, <32 x i8> poison, <32 x i32> zeroinitializer
  %v91 = icmp ult <32 x i8> <i8 0, i8 1, i8 2, i8 3, i8 4, i8 5, i8 6, i8 7, i8 8, i8 9, i8 10, i8 11, i8 12, i8 13, i8 14, i8 15, i8 16, i8 17, i8 18, i8 19, i8 20, i8 21, i8 22, i8 23, i8 24, i8 25, i8 26, i8 27, i8 28, i8 29, i8 30, i8 31>, %v90
  store <32 x double> splat (double 0x0000000000000000), ptr %v92
  store <32 x float> splat (float 0x0000000000000000), ptr %v93
  store i64 0, ptr %v94
  br label %loop95
loop95:
  %v97 = load i64, ptr %v94
  %v98 = add i64 %v97, 16
  %v99 = icmp slt i64 %v98, 300
  %v100 = select i1 %v99, i64 %v98, i64 300
  store i64 %v97, ptr %v101
  br label %loop102
loop102:
  %v104 = load i64, ptr %v101
  %v105 = mul i64 %v104, 40
  %v106 = add i64 %v84, %v105
  %v107 = getelementptr i16, ptr %v2, i64 %v106
  %v108 = call <32 x i16> @llvm.masked.load.v32i16.p0(ptr %v107, i32 2, <32 x i1> %v91, <32 x i16> zeroinitializer)
  %v109 = zext <32 x i16> %v108 to <32 x i32>
  %v110 = shl <32 x i32> %v109, splat (i32 16)
  %v111 = bitcast <32 x i32> %v110 to <32 x float>
  %v112 = fmul <32 x float> %v111, %v111
  %v113 = load <32 x float>, ptr %v93
  %v114 = call <32 x float> @llvm.fma.v32f32(<32 x float> %v111, <32 x float> %v111, <32 x float> %v113)
  store <32 x float> %v114, ptr %v93
  %v115 = add nsw i64 %v104, 1
  store i64 %v115, ptr %v101
  %v116 = icmp slt i64 %v115, %v100
  br i1 %v116, label %loop102, label %done103
done103:
  %v117 = load <32 x float>, ptr %v93
  %v118 = load <32 x double>, ptr %v92
  %v119 = fpext <32 x float> %v117 to <32 x double>
  %v120 = fadd <32 x double> %v118, %v119
  store <32 x double> %v120, ptr %v92
  store <32 x float> splat (float 0x0000000000000000), ptr %v93
  %v121 = add nsw i64 %v97, 16
  store i64 %v121, ptr %v94
  %v122 = icmp slt i64 %v121, 300
  br i1 %v122, label %loop95, label %done96
done96:
  %v123 = load <32 x double>, ptr %v92
  %v124 = fptrunc <32 x double> %v123 to <32 x float>
  %v125 = bitcast <32 x float> %v124 to <32 x i32>
  %v126 = lshr <32 x i32> %v125, splat (i32 16)
  %v127 = and <32 x i32> %v126, splat (i32 1)
  %v128 = add <32 x i32> %v127, splat (i32 32767)
  %v129 = add <32 x i32> %v125, %v128
  %v130 = fcmp uno <32 x float> %v124, %v124
  %v131 = select <32 x i1> %v130, <32 x i32> splat (i32 2143289344), <32 x i32> %v129
  %v132 = lshr <32 x i32> %v131, splat (i32 16)
  %v133 = trunc <32 x i32> %v132 to <32 x i16>
  %v134 = zext <32 x i16> %v133 to <32 x i32>
  %v135 = shl <32 x i32> %v134, splat (i32 16)
  %v136 = bitcast <32 x i32> %v135 to <32 x float>
  %v137 = getelementptr i16, ptr %v4, i64 %v84
  %v138 = bitcast <32 x float> %v136 to <32 x i32>
  %v139 = lshr <32 x i32> %v138, splat (i32 16)
  %v140 = and <32 x i32> %v139, splat (i32 1)
  %v141 = add <32 x i32> %v140, splat (i32 32767)
  %v142 = add <32 x i32> %v138, %v141
  %v143 = fcmp uno <32 x float> %v136, %v136
  %v144 = select <32 x i1> %v143, <32 x i32> splat (i32 2143289344), <32 x i32> %v142
  %v145 = lshr <32 x i32> %v144, splat (i32 16)
  %v146 = trunc <32 x i32> %v145 to <32 x i16>
  call void @llvm.masked.store.v32i16.p0(<32 x i16> %v146, ptr %v137, i32 2, <32 x i1> %v91)
  %v147 = add nsw i64 %v84, 32
  store i64 %v147, ptr %v79
  %v148 = icmp slt i64 %v147, %v12
  br i1 %v148, label %loop80, label %done81
done81:
  %v149 = add nsw i64 %v8, 1
  store i64 %v149, ptr %v5
  %v150 = icmp slt i64 %v149, %end
  br i1 %v150, label %loop6, label %done7
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
