"""diffusers: training a UNet, pipelines with a compiled UNet, autoencoders, transformers, regional compilation, adapters."""
import pytest
import torch
from uses import gradients, trained, use


def small_unet():
    from diffusers import UNet2DConditionModel
    return UNet2DConditionModel(sample_size=16, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(32, 64), cross_attention_dim=32, attention_head_dim=8,
                                down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"))


def small_autoencoder():
    from diffusers import AutoencoderKL
    return AutoencoderKL(block_out_channels=(32, 32), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4,
                         norm_num_groups=8)


def noise_loss(model, compiled, autocast=False):
    from diffusers import DDPMScheduler
    scheduler = DDPMScheduler()

    def step():
        x, noise, t = torch.randn(2, 4, 16, 16), torch.randn(2, 4, 16, 16), torch.randint(0, 1000, (2,))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = compiled(scheduler.add_noise(x, noise, t), t, encoder_hidden_states=torch.randn(2, 7, 32)).sample
        return torch.nn.functional.mse_loss(found.float(), noise)
    return trained(model, step)


@use("diffusers", graphs=1, rtol=1e-3, atol=1e-4)
def test_training(compile):
    model = small_unet()
    return noise_loss(model, compile(model))


@use("diffusers", graphs=1, rtol=3e-2, atol=3e-2)
def test_training_in_bfloat16(compile):
    model = small_unet()
    return noise_loss(model, compile(model), autocast=True)


@use("diffusers", graphs=1, rtol=1e-3, atol=1e-4)
def test_checkpointed_training(compile):
    model = small_unet().train()
    model.enable_gradient_checkpointing()
    return noise_loss(model, compile(model))


@use("diffusers", "peft", graphs=1, rtol=1e-3, atol=1e-4)
def test_adapter(compile):
    from peft import LoraConfig
    model = small_unet().requires_grad_(False)
    model.add_adapter(LoraConfig(r=4, target_modules=["to_k", "to_q", "to_v", "to_out.0"], init_lora_weights="gaussian"))
    return noise_loss(model, compile(model))


def image_pipeline(kind, compile):
    import diffusers
    unet = diffusers.UNet2DModel(sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(32, 64),
                                 down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"))
    pipeline = getattr(diffusers, f"{kind}Pipeline")(unet, getattr(diffusers, f"{kind}Scheduler")())
    pipeline.unet = compile(pipeline.unet, mode="reduce-overhead", fullgraph=True)
    pipeline.set_progress_bar_config(disable=True)
    return torch.as_tensor(pipeline(num_inference_steps=4, generator=torch.Generator().manual_seed(0), output_type="np").images)


@pytest.mark.parametrize("kind", ["DDPM", "DDIM"])
def test_image_pipelines(kind):
    @use("diffusers", graphs=1, rtol=1e-3, atol=1e-3)
    def runs(compile):
        return image_pipeline(kind, compile)
    runs()


@pytest.mark.parametrize("kind", ["EulerDiscreteScheduler", "DPMSolverMultistepScheduler"])
def test_text_to_image(kind):
    @use("diffusers", "transformers", graphs=2, rtol=1e-3, atol=1e-3)
    def runs(compile):
        import diffusers
        pipeline = diffusers.StableDiffusionPipeline(vae=small_autoencoder(), text_encoder=None, tokenizer=None, unet=small_unet(), scheduler=getattr(diffusers, kind)(),
                                                     safety_checker=None, feature_extractor=None, requires_safety_checker=False)
        pipeline.set_progress_bar_config(disable=True)
        pipeline.unet = compile(pipeline.unet, mode="reduce-overhead", fullgraph=True)
        pipeline.vae.decode = compile(pipeline.vae.decode, fullgraph=True)
        return torch.as_tensor(pipeline(prompt_embeds=torch.randn(1, 7, 32), negative_prompt_embeds=torch.randn(1, 7, 32), num_inference_steps=3, height=32, width=32,
                                        generator=torch.Generator().manual_seed(0), output_type="np").images)
    runs()


@use("diffusers", graphs=1, rtol=1e-3, atol=1e-4)
def test_autoencoder(compile):
    model = small_autoencoder()
    found = compile(model)(torch.randn(1, 3, 16, 16), sample_posterior=True, generator=torch.Generator().manual_seed(0)).sample
    found.square().mean().backward()
    return found, gradients(model)


@use("diffusers", graphs=1, rtol=1e-3, atol=1e-4)
def test_joint_transformer(compile):
    from diffusers import SD3Transformer2DModel
    model = SD3Transformer2DModel(sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4, joint_attention_dim=32,
                                  caption_projection_dim=32, pooled_projection_dim=16, out_channels=4)
    found = compile(model, fullgraph=True)(torch.randn(2, 4, 8, 8), torch.randn(2, 7, 32), torch.randn(2, 16), torch.tensor([3, 9])).sample
    found.square().mean().backward()
    return found, gradients(model)


@use("diffusers", graphs=3)     # one for each kind of block, and the second single block gets a slice
def test_repeated_blocks(compile):
    from diffusers import FluxTransformer2DModel
    model = FluxTransformer2DModel(patch_size=1, in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32,
                                   pooled_projection_dim=32, axes_dims_rope=[4, 4, 8])
    if compile is torch.compile:
        model.compile_repeated_blocks(fullgraph=True)
    with torch.no_grad():
        return model(hidden_states=torch.randn(1, 16, 4), encoder_hidden_states=torch.randn(1, 7, 32), pooled_projections=torch.randn(1, 32), timestep=torch.tensor([0.5]),
                     img_ids=torch.randn(16, 3), txt_ids=torch.zeros(7, 3)).sample
