define void @k_a3041a1558a773fd16f5c6aa(ptr %given) #0 {
entry:
  %v5 = alloca i64
  %v9 = alloca <32 x float>
  %v13 = alloca i64
  %v30 = alloca i64
  %v86 = alloca <16 x float>
  %v90 = alloca i64
  %v133 = alloca i64
  %v199 = alloca i64
  %v244 = alloca i64
  %bits = ptrtoint ptr %given to i64
  %odd = trunc i64 %bits to i1
  br i1 %odd, label %slice, label %start
start:
  call void @fs_run(ptr @k_a3041a1558a773fd16f5c6aa, ptr %given, i64 4, i64 11600)
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
  store <32 x float> splat (float 0xFFF0000000000000), ptr %v9
  %v10 = sub i64 100, 0
  %v11 = and i64 %v10, -32
  %v12 = add i64 0, %v11
  %v19 = mul i64 %v8, 100
  %v16 = icmp slt i64 0, %v12
  br i1 %v16, label %some17, label %done15
some17:
  store i64 0, ptr %v13
  br label %loop14
loop14:
  %v18 = load i64, ptr %v13
  %v20 = add i64 %v19, %v18
  %v21 = getelementptr float, ptr %v2, i64 %v20
  %v22 = load <32 x float>, ptr %v21, align 4
  %v23 = load <32 x float>, ptr %v9
  %v24 = fcmp ogt <32 x float> %v23, %v22
  %v25 = select <32 x i1> %v24, <32 x float> %v23, <32 x float> %v22
  %v26 = fcmp uno <32 x float> %v23, %v23
  %v27 = select <32 x i1> %v26, <32 x float> %v23, <32 x float> %v25
  store <32 x float> %v27, ptr %v9
  %v28 = add nsw i64 %v18, 32
  store i64 %v28, ptr %v13
  %v29 = icmp slt i64 %v28, %v12
  br i1 %v29, label %loop14, label %done15
done15:
  %v33 = icmp slt i64 %v12, 100
  br i1 %v33, label %some34, label %done32
some34:
  store i64 %v12, ptr %v30
  br label %loop31
loop31:
  %v35 = load i64, ptr %v30
  %v36 = sub i64 100, %v35
  %v37 = icmp slt i64 %v36, 32
  %v38 = select i1 %v37, i64 %v36, i64 32
  %v39 = trunc i64 %v38 to i8
  %v40 = insertelement <32 x i8> poison, i8 %v39, i64 0
  %v41 = shufflevector <32 x i8> %v40, <32 x i8> poison, <32 x i32> zeroinitializer
  %v42 = icmp ult <32 x i8> <i8 0, i8 1, i8 2, i8 3, i8 4, i8 5, i8 6, i8 7, i8 8, i8 9, i8 10, i8 11, i8 12, i8 13, i8 14, i8 15, i8 16, i8 17, i8 18, i8 19, i8 20, i8 21, i8 22, i8 23, i8 24, i8 25, i8 26, i8 27, i8 28, i8 29, i8 30, i8 31>, %v41
  %v43 = add i64 %v19, %v35
  %v44 = getelementptr float, ptr %v2, i64 %v43
  %v45 = call <32 x float> @llvm.masked.load.v32f32.p0(ptr %v44, i32 4, <32 x i1> %v42, <32 x float> zeroinitializer)
  %v46 = load <32 x float>, ptr %v9
  %v47 = fcmp ogt <32 x float> %v46, %v45
  %v48 = select <32 x i1> %v47, <32 x float> %v46, <32 x float> %v45
  %v49 = fcmp uno <32 x float> %v46, %v46
  %v50 = select <32 x i1> %v49, <32 x float> %v46, <32 x float> %v48
  %v51 = select <32 x i1> %v42, <32 x float> %v50, <32 x float> %v46
  store <32 x float> %v51, ptr %v9
  %v52 = add nsw i64 %v35, 32
  store i64 %v52, ptr %v30
  %v53 = icmp slt i64 %v52, 100
  br i1 %v53, label %loop31, label %done32
done32:
  %v54 = load <32 x float>, ptr %v9
  %v55 = shufflevector <32 x float> %v54, <32 x float> poison, <16 x i32> <i32 0, i32 1, i32 2, i32 3, i32 4, i32 5, i32 6, i32 7, i32 8, i32 9, i32 10, i32 11, i32 12, i32 13, i32 14, i32 15>
  %v56 = shufflevector <32 x float> %v54, <32 x float> poison, <16 x i32> <i32 16, i32 17, i32 18, i32 19, i32 20, i32 21, i32 22, i32 23, i32 24, i32 25, i32 26, i32 27, i32 28, i32 29, i32 30, i32 31>
  %v57 = fcmp ogt <16 x float> %v55, %v56
  %v58 = select <16 x i1> %v57, <16 x float> %v55, <16 x float> %v56
  %v59 = fcmp uno <16 x float> %v55, %v55
  %v60 = select <16 x i1> %v59, <16 x float> %v55, <16 x float> %v58
  %v61 = shufflevector <16 x float> %v60, <16 x float> poison, <8 x i32> <i32 0, i32 1, i32 2, i32 3, i32 4, i32 5, i32 6, i32 7>
  %v62 = shufflevector <16 x float> %v60, <16 x float> poison, <8 x i32> <i32 8, i32 9, i32 10, i32 11, i32 12, i32 13, i32 14, i32 15>
  %v63 = fcmp ogt <8 x float> %v61, %v62
  %v64 = select <8 x i1> %v63, <8 x float> %v61, <8 x float> %v62
  %v65 = fcmp uno <8 x float> %v61, %v61
  %v66 = select <8 x i1> %v65, <8 x float> %v61, <8 x float> %v64
  %v67 = shufflevector <8 x float> %v66, <8 x float> poison, <4 x i32> <i32 0, i32 1, i32 2, i32 3>
  %v68 = shufflevector <8 x float> %v66, <8 x float> poison, <4 x i32> <i32 4, i32 5, i32 6, i32 7>
  %v69 = fcmp ogt <4 x float> %v67, %v68
  %v70 = select <4 x i1> %v69, <4 x float> %v67, <4 x float> %v68
  %v71 = fcmp uno <4 x float> %v67, %v67
  %v72 = select <4 x i1> %v71, <4 x float> %v67, <4 x float> %v70
  %v73 = shufflevector <4 x float> %v72, <4 x float> poison, <2 x i32> <i32 0, i32 1>
  %v74 = shufflevector <4 x float> %v72, <4 x float> poison, <2 x i32> <i32 2, i32 3>
  %v75 = fcmp ogt <2 x float> %v73, %v74
  %v76 = select <2 x i1> %v75, <2 x float> %v73, <2 x float> %v74
  %v77 = fcmp uno <2 x float> %v73, %v73
  %v78 = select <2 x i1> %v77, <2 x float> %v73, <2 x float> %v76
  %v79 = shufflevector <2 x float> %v78, <2 x float> poison, <1 x i32> <i32 0>
  %v80 = shufflevector <2 x float> %v78, <2 x float> poison, <1 x i32> <i32 1>
  %v81 = fcmp ogt <1 x float> %v79, %v80
  %v82 = select <1 x i1> %v81, <1 x float> %v79, <1 x float> %v80
  %v83 = fcmp uno <1 x float> %v79, %v79
  %v84 = select <1 x i1> %v83, <1 x float> %v79, <1 x float> %v82
  %v85 = extractelement <1 x float> %v84, i64 0
  store <16 x float> splat (float 0x0000000000000000), ptr %v86
  %v87 = sub i64 100, 0
  %v88 = and i64 %v87, -16
  %v89 = add i64 0, %v88
  %v99 = insertelement <16 x float> poison, float %v85, i64 0
  %v100 = shufflevector <16 x float> %v99, <16 x float> poison, <16 x i32> zeroinitializer
  %v93 = icmp slt i64 0, %v89
  br i1 %v93, label %some94, label %done92
some94:
  store i64 0, ptr %v90
  br label %loop91
loop91:
  %v95 = load i64, ptr %v90
  %v96 = add i64 %v19, %v95
  %v97 = getelementptr float, ptr %v2, i64 %v96
  %v98 = load <16 x float>, ptr %v97, align 4
  %v101 = fsub <16 x float> %v98, %v100
  %v102 = fcmp olt <16 x float> splat (float 0x4056400000000000), %v101
  %v103 = select <16 x i1> %v102, <16 x float> splat (float 0x4056400000000000), <16 x float> %v101
  %v104 = fcmp ogt <16 x float> splat (float 0xC05A000000000000), %v103
  %v105 = select <16 x i1> %v104, <16 x float> splat (float 0xC05A000000000000), <16 x float> %v103
  %v106 = fmul <16 x float> %v105, splat (float 0x3FF7154760000000)
  %v107 = call <16 x float> @llvm.roundeven.v16f32(<16 x float> %v106)
  %v108 = call <16 x float> @llvm.fma.v16f32(<16 x float> %v107, <16 x float> splat (float 0xBFE6300000000000), <16 x float> %v105)
  %v109 = call <16 x float> @llvm.fma.v16f32(<16 x float> %v107, <16 x float> splat (float 0x3F2BD01060000000), <16 x float> %v108)
  %v110 = call <16 x float> @llvm.fma.v16f32(<16 x float> splat (float 0x3F56DB45E0000000), <16 x float> %v109, <16 x float> splat (float 0x3F8123B7E0000000))
  %v111 = call <16 x float> @llvm.fma.v16f32(<16 x float> %v110, <16 x float> %v109, <16 x float> splat (float 0x3FA55545E0000000))
  %v112 = call <16 x float> @llvm.fma.v16f32(<16 x float> %v111, <16 x float> %v109, <16 x float> splat (float 0x3FC55548E0000000))
  %v113 = call <16 x float> @llvm.fma.v16f32(<16 x float> %v112, <16 x float> %v109, <16 x float> splat (float 0x3FE0000000000000))
  %v114 = fmul <16 x float> %v109, %v109
  %v115 = call <16 x float> @llvm.fma.v16f32(<16 x float> %v113, <16 x float> %v114, <16 x float> %v109)
  %v116 = fadd <16 x float> %v115, splat (float 0x3FF0000000000000)
  %v117 = fptosi <16 x float> %v107 to <16 x i32>
  %v118 = freeze <16 x i32> %v117
  %v119 = ashr <16 x i32> %v118, splat (i32 1)
  %v120 = sub <16 x i32> %v118, %v119
  %v121 = add <16 x i32> %v119, splat (i32 127)
  %v122 = shl <16 x i32> %v121, splat (i32 23)
  %v123 = bitcast <16 x i32> %v122 to <16 x float>
  %v124 = fmul <16 x float> %v116, %v123
  %v125 = add <16 x i32> %v120, splat (i32 127)
  %v126 = shl <16 x i32> %v125, splat (i32 23)
  %v127 = bitcast <16 x i32> %v126 to <16 x float>
  %v128 = fmul <16 x float> %v124, %v127
  %v129 = load <16 x float>, ptr %v86
  %v130 = fadd <16 x float> %v129, %v128
  store <16 x float> %v130, ptr %v86
  %v131 = add nsw i64 %v95, 16
  store i64 %v131, ptr %v90
  %v132 = icmp slt i64 %v131, %v89
  br i1 %v132, label %loop91, label %done92
done92:
  %v136 = icmp slt i64 %v89, 100
  br i1 %v136, label %some137, label %done135
some137:
  store i64 %v89, ptr %v133
  br label %loop134
loop134:
  %v138 = load i64, ptr %v133
  %v139 = sub i64 100, %v138
  %v140 = icmp slt i64 %v139, 16
  %v141 = select i1 %v140, i64 %v139, i64 16
  %v142 = trunc i64 %v141 to i8
  %v143 = insertelement <16 x i8> poison, i8 %v142, i64 0
  %v144 = shufflevector <16 x i8> %v143, <16 x i8> poison, <16 x i32> zeroinitializer
  %v145 = icmp ult <16 x i8> <i8 0, i8 1, i8 2, i8 3, i8 4, i8 5, i8 6, i8 7, i8 8, i8 9, i8 10, i8 11, i8 12, i8 13, i8 14, i8 15>, %v144
  %v146 = add i64 %v19, %v138
  %v147 = getelementptr float, ptr %v2, i64 %v146
  %v148 = call <16 x float> @llvm.masked.load.v16f32.p0(ptr %v147, i32 4, <16 x i1> %v145, <16 x float> zeroinitializer)
  %v149 = fsub <16 x float> %v148, %v100
  %v150 = fcmp olt <16 x float> splat (float 0x4056400000000000), %v149
  %v151 = select <16 x i1> %v150, <16 x float> splat (float 0x4056400000000000), <16 x float> %v149
  %v152 = fcmp ogt <16 x float> splat (float 0xC05A000000000000), %v151
  %v153 = select <16 x i1> %v152, <16 x float> splat (float 0xC05A000000000000), <16 x float> %v151
  %v154 = fmul <16 x float> %v153, splat (float 0x3FF7154760000000)
  %v155 = call <16 x float> @llvm.roundeven.v16f32(<16 x float> %v154)
  %v156 = call <16 x float> @llvm.fma.v16f32(<16 x float> %v155, <16 x float> splat (float 0xBFE6300000000000), <16 x float> %v153)
  %v157 = call <16 x float> @llvm.fma.v16f32(<16 x float> %v155, <16 x float> splat (float 0x3F2BD01060000000), <16 x float> %v156)
  %v158 = call <16 x float> @llvm.fma.v16f32(<16 x float> splat (float 0x3F56DB45E0000000), <16 x float> %v157, <16 x float> splat (float 0x3F8123B7E0000000))
  %v159 = call <16 x float> @llvm.fma.v16f32(<16 x float> %v158, <16 x float> %v157, <16 x float> splat (float 0x3FA55545E0000000))
  %v160 = call <16 x float> @llvm.fma.v16f32(<16 x float> %v159, <16 x float> %v157, <16 x float> splat (float 0x3FC55548E0000000))
  %v161 = call <16 x float> @llvm.fma.v16f32(<16 x float> %v160, <16 x float> %v157, <16 x float> splat (float 0x3FE0000000000000))
  %v162 = fmul <16 x float> %v157, %v157
  %v163 = call <16 x float> @llvm.fma.v16f32(<16 x float> %v161, <16 x float> %v162, <16 x float> %v157)
  %v164 = fadd <16 x float> %v163, splat (float 0x3FF0000000000000)
  %v165 = fptosi <16 x float> %v155 to <16 x i32>
  %v166 = freeze <16 x i32> %v165
  %v167 = ashr <16 x i32> %v166, splat (i32 1)
  %v168 = sub <16 x i32> %v166, %v167
  %v169 = add <16 x i32> %v167, splat (i32 127)
  %v170 = shl <16 x i32> %v169, splat (i32 23)
  %v171 = bitcast <16 x i32> %v170 to <16 x float>
  %v172 = fmul <16 x float> %v164, %v171
  %v173 = add <16 x i32> %v168, splat (i32 127)
  %v174 = shl <16 x i32> %v173, splat (i32 23)
  %v175 = bitcast <16 x i32> %v174 to <16 x float>
  %v176 = fmul <16 x float> %v172, %v175
  %v177 = load <16 x float>, ptr %v86
  %v178 = fadd <16 x float> %v177, %v176
  %v179 = select <16 x i1> %v145, <16 x float> %v178, <16 x float> %v177
  store <16 x float> %v179, ptr %v86
  %v180 = add nsw i64 %v138, 16
  store i64 %v180, ptr %v133
  %v181 = icmp slt i64 %v180, 100
  br i1 %v181, label %loop134, label %done135
done135:
  %v182 = load <16 x float>, ptr %v86
  %v183 = shufflevector <16 x float> %v182, <16 x float> poison, <8 x i32> <i32 0, i32 1, i32 2, i32 3, i32 4, i32 5, i32 6, i32 7>
  %v184 = shufflevector <16 x float> %v182, <16 x float> poison, <8 x i32> <i32 8, i32 9, i32 10, i32 11, i32 12, i32 13, i32 14, i32 15>
  %v185 = fadd <8 x float> %v183, %v184
  %v186 = shufflevector <8 x float> %v185, <8 x float> poison, <4 x i32> <i32 0, i32 1, i32 2, i32 3>
  %v187 = shufflevector <8 x float> %v185, <8 x float> poison, <4 x i32> <i32 4, i32 5, i32 6, i32 7>
  %v188 = fadd <4 x float> %v186, %v187
  %v189 = shufflevector <4 x float> %v188, <4 x float> poison, <2 x i32> <i32 0, i32 1>
  %v190 = shufflevector <4 x float> %v188, <4 x float> poison, <2 x i32> <i32 2, i32 3>
  %v191 = fadd <2 x float> %v189, %v190
  %v192 = shufflevector <2 x float> %v191, <2 x float> poison, <1 x i32> <i32 0>
  %v193 = shufflevector <2 x float> %v191, <2 x float> poison, <1 x i32> <i32 1>
  %v194 = fadd <1 x float> %v192, %v193
  %v195 = extractelement <1 x float> %v194, i64 0
  %v196 = sub i64 100, 0
  %v197 = and i64 %v196, -8
  %v198 = add i64 0, %v197
  %v208 = insertelement <8 x float> poison, float %v85, i64 0
  %v209 = shufflevector <8 x float> %v208, <8 x float> poison, <8 x i32> zeroinitializer
  %v238 = insertelement <8 x float> poison, float %v195, i64 0
  %v239 = shufflevector <8 x float> %v238, <8 x float> poison, <8 x i32> zeroinitializer
  %v202 = icmp slt i64 0, %v198
  br i1 %v202, label %some203, label %done201
some203:
  store i64 0, ptr %v199
  br label %loop200
loop200:
  %v204 = load i64, ptr %v199
  %v205 = add i64 %v19, %v204
  %v206 = getelementptr float, ptr %v2, i64 %v205
  %v207 = load <8 x float>, ptr %v206, align 4
  %v210 = fsub <8 x float> %v207, %v209
  %v211 = fcmp olt <8 x float> splat (float 0x4056400000000000), %v210
  %v212 = select <8 x i1> %v211, <8 x float> splat (float 0x4056400000000000), <8 x float> %v210
  %v213 = fcmp ogt <8 x float> splat (float 0xC05A000000000000), %v212
  %v214 = select <8 x i1> %v213, <8 x float> splat (float 0xC05A000000000000), <8 x float> %v212
  %v215 = fmul <8 x float> %v214, splat (float 0x3FF7154760000000)
  %v216 = call <8 x float> @llvm.roundeven.v8f32(<8 x float> %v215)
  %v217 = call <8 x float> @llvm.fma.v8f32(<8 x float> %v216, <8 x float> splat (float 0xBFE6300000000000), <8 x float> %v214)
  %v218 = call <8 x float> @llvm.fma.v8f32(<8 x float> %v216, <8 x float> splat (float 0x3F2BD01060000000), <8 x float> %v217)
  %v219 = call <8 x float> @llvm.fma.v8f32(<8 x float> splat (float 0x3F56DB45E0000000), <8 x float> %v218, <8 x float> splat (float 0x3F8123B7E0000000))
  %v220 = call <8 x float> @llvm.fma.v8f32(<8 x float> %v219, <8 x float> %v218, <8 x float> splat (float 0x3FA55545E0000000))
  %v221 = call <8 x float> @llvm.fma.v8f32(<8 x float> %v220, <8 x float> %v218, <8 x float> splat (float 0x3FC55548E0000000))
  %v222 = call <8 x float> @llvm.fma.v8f32(<8 x float> %v221, <8 x float> %v218, <8 x float> splat (float 0x3FE0000000000000))
  %v223 = fmul <8 x float> %v218, %v218
  %v224 = call <8 x float> @llvm.fma.v8f32(<8 x float> %v222, <8 x float> %v223, <8 x float> %v218)
  %v225 = fadd <8 x float> %v224, splat (float 0x3FF0000000000000)
  %v226 = fptosi <8 x float> %v216 to <8 x i32>
  %v227 = freeze <8 x i32> %v226
  %v228 = ashr <8 x i32> %v227, splat (i32 1)
  %v229 = sub <8 x i32> %v227, %v228
  %v230 = add <8 x i32> %v228, splat (i32 127)
  %v231 = shl <8 x i32> %v230, splat (i32 23)
  %v232 = bitcast <8 x i32> %v231 to <8 x float>
  %v233 = fmul <8 x float> %v225, %v232
  %v234 = add <8 x i32> %v229, splat (i32 127)
  %v235 = shl <8 x i32> %v234, splat (i32 23)
  %v236 = bitcast <8 x i32> %v235 to <8 x float>
  %v237 = fmul <8 x float> %v233, %v236
  %v240 = fdiv <8 x float> %v237, %v239
  %v241 = getelementptr float, ptr %v4, i64 %v205
  store <8 x float> %v240, ptr %v241, align 4
  %v242 = add nsw i64 %v204, 8
  store i64 %v242, ptr %v199
  %v243 = icmp slt i64 %v242, %v198
  br i1 %v243, label %loop200, label %done201
done201:
  %v247 = icmp slt i64 %v198, 100
  br i1 %v247, label %some248, label %done246
some248:
  store i64 %v198, ptr %v244
  br label %loop245
loop245:
  %v249 = load i64, ptr %v244
  %v250 = sub i64 100, %v249
  %v251 = icmp slt i64 %v250, 8
  %v252 = select i1 %v251, i64 %v250, i64 8
  %v253 = trunc i64 %v252 to i16
  %v254 = insertelement <8 x i16> poison, i16 %v253, i64 0
  %v255 = shufflevector <8 x i16> %v254, <8 x i16> poison, <8 x i32> zeroinitializer
  %v256 = icmp ult <8 x i16> <i16 0, i16 1, i16 2, i16 3, i16 4, i16 5, i16 6, i16 7>, %v255
  %v257 = add i64 %v19, %v249
  %v258 = getelementptr float, ptr %v2, i64 %v257
  %v259 = call <8 x float> @llvm.masked.load.v8f32.p0(ptr %v258, i32 4, <8 x i1> %v256, <8 x float> zeroinitializer)
  %v260 = fsub <8 x float> %v259, %v209
  %v261 = fcmp olt <8 x float> splat (float 0x4056400000000000), %v260
  %v262 = select <8 x i1> %v261, <8 x float> splat (float 0x4056400000000000), <8 x float> %v260
  %v263 = fcmp ogt <8 x float> splat (float 0xC05A000000000000), %v262
  %v264 = select <8 x i1> %v263, <8 x float> splat (float 0xC05A000000000000), <8 x float> %v262
  %v265 = fmul <8 x float> %v264, splat (float 0x3FF7154760000000)
  %v266 = call <8 x float> @llvm.roundeven.v8f32(<8 x float> %v265)
  %v267 = call <8 x float> @llvm.fma.v8f32(<8 x float> %v266, <8 x float> splat (float 0xBFE6300000000000), <8 x float> %v264)
  %v268 = call <8 x float> @llvm.fma.v8f32(<8 x float> %v266, <8 x float> splat (float 0x3F2BD01060000000), <8 x float> %v267)
  %v269 = call <8 x float> @llvm.fma.v8f32(<8 x float> splat (float 0x3F56DB45E0000000), <8 x float> %v268, <8 x float> splat (float 0x3F8123B7E0000000))
  %v270 = call <8 x float> @llvm.fma.v8f32(<8 x float> %v269, <8 x float> %v268, <8 x float> splat (float 0x3FA55545E0000000))
  %v271 = call <8 x float> @llvm.fma.v8f32(<8 x float> %v270, <8 x float> %v268, <8 x float> splat (float 0x3FC55548E0000000))
  %v272 = call <8 x float> @llvm.fma.v8f32(<8 x float> %v271, <8 x float> %v268, <8 x float> splat (float 0x3FE0000000000000))
  %v273 = fmul <8 x float> %v268, %v268
  %v274 = call <8 x float> @llvm.fma.v8f32(<8 x float> %v272, <8 x float> %v273, <8 x float> %v268)
  %v275 = fadd <8 x float> %v274, splat (float 0x3FF0000000000000)
  %v276 = fptosi <8 x float> %v266 to <8 x i32>
  %v277 = freeze <8 x i32> %v276
  %v278 = ashr <8 x i32> %v277, splat (i32 1)
  %v279 = sub <8 x i32> %v277, %v278
  %v280 = add <8 x i32> %v278, splat (i32 127)
  %v281 = shl <8 x i32> %v280, splat (i32 23)
  %v282 = bitcast <8 x i32> %v281 to <8 x float>
  %v283 = fmul <8 x float> %v275, %v282
  %v284 = add <8 x i32> %v279, splat (i32 127)
  %v285 = shl <8 x i32> %v284, splat (i32 23)
  %v286 = bitcast <8 x i32> %v285 to <8 x float>
  %v287 = fmul <8 x float> %v283, %v286
  %v288 = fdiv <8 x float> %v287, %v239
  %v289 = getelementptr float, ptr %v4, i64 %v257
  call void @llvm.masked.store.v8f32.p0(<8 x float> %v288, ptr %v289, i32 4, <8 x i1> %v256)
  %v290 = add nsw i64 %v249, 8
  store i64 %v290, ptr %v244
  %v291 = icmp slt i64 %v290, 100
  br i1 %v291, label %loop245, label %done246
done246:
  %v292 = add nsw i64 %v8, 1
  store i64 %v292, ptr %v5
  %v293 = icmp slt i64 %v292, %end
  br i1 %v293, label %loop6, label %done7
done7:
  ret void
}
declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)
declare <8 x float> @llvm.fma.v8f32(<8 x float>, <8 x float>, <8 x float>)
declare <16 x float> @llvm.masked.load.v16f32.p0(ptr, i32, <16 x i1>, <16 x float>)
declare <32 x float> @llvm.masked.load.v32f32.p0(ptr, i32, <32 x i1>, <32 x float>)
declare <8 x float> @llvm.masked.load.v8f32.p0(ptr, i32, <8 x i1>, <8 x float>)
declare void @llvm.masked.store.v8f32.p0(<8 x float>, ptr, i32, <8 x i1>)
declare <16 x float> @llvm.roundeven.v16f32(<16 x float>)
declare <8 x float> @llvm.roundeven.v8f32(<8 x float>)
declare void @fs_run(ptr, ptr, i64, i64)
attributes #0 = { nounwind alignstack=32 }
attributes #1 = { nounwind willreturn memory(none) }
!0 = !{!"branch_weights", i32 1, i32 100000}
